"""The CPU executor against MLX's own text and errors, and MSL's rules against numpy."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from conftest import SEED

from lily_mlx.runtime import simt
from lily_mlx.runtime.simt import signature

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package"
)
RNG = np.random.default_rng(SEED)


def run(source, inputs, outputs, threads, threadgroup=None, **options):
    """Outputs of a kernel with inputs and outputs by name; an output is (shape, dtype)."""
    call = options.pop("call", {})
    made = simt.metal_kernel("probe", list(inputs), list(outputs), source, **options)
    grid = threads if isinstance(threads, tuple) else (threads, 1, 1)
    return made(
        inputs=list(inputs.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=grid,
        threadgroup=threadgroup or (min(32, grid[0]), 1, 1),
        **call,
    )


# ---- the text and the errors are MLX's

ADD = "uint i = thread_position_in_grid.x; y[i] = x[i] + n[0];"
TEXTS = {
    "plain": ("y[thread_position_in_grid.x] = x[0];", {}, {}),
    "scalars and small inputs": ("y[0] = x[0] + n;", {"n": mx.array(3)}, {}),
    "one element": (ADD, {"n": mx.array([3.0])}, {}),
    "seven elements": (ADD, {"n": mx.zeros(7, mx.bfloat16)}, {}),
    "eight elements": (ADD, {"n": mx.zeros(8, mx.float16)}, {}),
    "shape, strides, ndim": (
        "y[0] = x[elem_to_loc(0, x_shape, x_strides, x_ndim)] + n_shape[1];",
        {"n": mx.zeros((3, 5), mx.int64)},
        {"ensure_row_contiguous": False},
    ),
    "attributes": (
        "y[thread_index_in_simdgroup] = simdgroup_index_in_threadgroup + threads_per_threadgroup.x"
        " + threadgroup_position_in_grid.y + thread_index_in_threadgroup + threadgroups_per_grid.z"
        " + simdgroups_per_threadgroup + thread_position_in_threadgroup.x;",
        {},
        {},
    ),
    "atomic outputs": (
        "atomic_fetch_add_explicit(&y[0], x[0], memory_order_relaxed);",
        {},
        {"atomic_outputs": True},
    ),
    "header": (
        "y[0] = twice(x[0]);",
        {},
        {"header": "inline float twice(float x) { return x + x; }"},
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_what_mlx_prints(name, capfd):
    source, more, options = TEXTS[name]
    inputs = {"x": mx.zeros((4, 6)).T, **more}
    made = mx.fast.metal_kernel("probe", list(inputs), ["y"], source, **options)
    call = {
        "template": [("T", mx.bfloat16), ("N", -3), ("FLAG", True)],
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
    }
    ours = signature.mlx_text(made, list(inputs.values()), call)
    capfd.readouterr()
    verbose = lambda *traced: made(inputs=list(traced), verbose=True, **call)  # noqa: E731
    mx.export_function(lambda entry: None, verbose, *inputs.values())
    printed = capfd.readouterr().out
    assert "[[kernel]]" in ours
    assert ours.strip() in printed
    # What the executor reads out of the text is what MLX wrote.
    body, expression = signature.instantiation(ours)
    assert expression.endswith("<bfloat16_t, -3, 1>")
    parsed = signature.parameters(body, expression.split("<")[0])
    buffers = [p for p in parsed if p.kind == "buffer"]
    assert [p.index for p in buffers] == list(range(len(buffers)))
    for p in buffers:
        assert p.reference == (f"& {p.name} [[buffer({p.index})]]" in printed)
    for p in parsed:
        assert p.kind == "buffer" or f"[[{p.attribute}]]" in printed


def test_wrong_arguments_give_mlx_errors():
    bad = [
        {"inputs": []},
        {"inputs": [mx.zeros(4), mx.zeros(4)]},
        {"output_shapes": [(4,), (4,)]},
        {"output_dtypes": []},
        {"template": [("T", "float")]},
    ]
    good = {
        "inputs": [mx.zeros(4)],
        "output_shapes": [(4,)],
        "output_dtypes": [mx.float32],
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
    }
    source = "y[thread_position_in_grid.x] = x[0];"
    theirs = mx.fast.metal_kernel("probe", ["x"], ["y"], source)
    ours = simt.metal_kernel("probe", ["x"], ["y"], source)
    for change in bad:
        with pytest.raises((ValueError, TypeError)) as expected:
            theirs(**(good | change))
        with pytest.raises(expected.type) as got:
            ours(**(good | change))
        assert str(got.value).split("\n")[0] == str(expected.value).split("\n")[0]
    with pytest.raises(ValueError, match="2048 threads; Metal allows 1024"):
        ours(**(good | {"grid": (2048, 1, 1), "threadgroup": (2048, 1, 1)}))
    with pytest.raises(ValueError, match="not positive"):
        ours(**(good | {"threadgroup": (0, 1, 1)}))


def test_compile_error_names_the_kernel_and_line():
    with pytest.raises(simt.BuildError, match=r"probe\.metal:7:"):
        run(
            '\n#line 7 "probe.metal"\ny[0] = nothing;',
            {"x": mx.zeros(4)},
            {"y": ((4,), mx.float32)},
            4,
        )


def test_mx_compile_is_refused_with_the_way_out():
    f = mx.compile(lambda x: run("y[0] = x[0];", {"x": x}, {"y": ((1,), mx.float32)}, 1)[0])
    with pytest.raises(ValueError, match="disable_compile"):
        f(mx.zeros(4))


# ---- memory, grids, types


def test_strided_inputs_keep_their_strides_or_are_copied():
    x = mx.array(RNG.normal(size=(6, 9, 4)).astype(np.float32)).transpose(2, 0, 1)[1:, ::2]
    source = """
    uint i = thread_position_in_grid.x;
    y[i] = x[elem_to_loc(int64_t(i), x_shape, x_strides, x_ndim)];
    """
    for view in (x, x[::-1, :, ::-1], mx.broadcast_to(x[:1], x.shape)):
        for contiguous in (False, True):
            options = {"ensure_row_contiguous": contiguous}
            outputs = {"y": (view.shape, mx.float32)}
            (y,) = run(source, {"x": view}, outputs, view.size, **options)
            assert mx.array_equal(y, view)
            with simt.record() as report:
                (y,) = run(source, {"x": view}, outputs, view.size, **options)
            report.assert_clean()
            assert mx.array_equal(y, view)


def test_outputs_start_poisoned_or_at_the_initial_value():
    inputs, outputs = {"x": mx.zeros(4)}, {"y": ((3,), mx.bfloat16), "z": ((2,), mx.int32)}
    source = "if (x[0] > 1) { y[0] = 1; z[0] = 1; }"
    y, z = run(source, inputs, outputs, 1)
    assert mx.all(mx.isnan(y)) and z.tolist() == [-1, -1]
    y, z = run(source, inputs, outputs, 1, call={"init_value": 2})
    assert y.tolist() == [2, 2, 2] and z.tolist() == [2, 2]


def test_every_thread_of_a_ragged_grid_runs_once_where_it_says():
    grid, group = (13, 7, 5), (4, 3, 2)
    source = """
    uint3 p = thread_position_in_grid;
    uint3 full = dispatch_threads_per_threadgroup;
    bool right = all(p == threadgroup_position_in_grid * full + thread_position_in_threadgroup);
    uint3 size = threads_per_threadgroup;
    uint3 t = thread_position_in_threadgroup;
    right = right && thread_index_in_threadgroup == t.x + size.x * (t.y + size.y * t.z);
    right = right && simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup
        == thread_index_in_threadgroup;
    uint i = p.x + threads_per_grid.x * (p.y + threads_per_grid.y * p.z);
    atomic_fetch_add_explicit(&y[i], right ? 1 : 100, memory_order_relaxed);
    """
    (y,) = run(
        source,
        {"x": mx.zeros(1)},
        {"y": ((13 * 7 * 5,), mx.int32)},
        grid,
        group,
        atomic_outputs=True,
        call={"init_value": 0},
    )
    assert mx.all(y == 1)


def test_bfloat_rounds_as_mlx_does_and_converts_as_msl_says():
    bits = RNG.integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = [0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000]
    x = mx.array(bits).view(mx.float32)
    x = mx.where(mx.isnan(x), 1.5, x)
    one = "uint i = thread_position_in_grid.x; "
    (y,) = run(one + "y[i] = bfloat(x[i]);", {"x": x}, {"y": (x.shape, mx.bfloat16)}, x.size)
    assert mx.array_equal(y.view(mx.uint16), x.astype(mx.bfloat16).view(mx.uint16))
    a, b = (mx.array(RNG.normal(size=512).astype(np.float32)).astype(mx.bfloat16) for _ in "ab")
    source = one + "y[i] = a[i] * b[i] + a[i]; z[i] = a[i] * float(b[i]) + 1; y[i] += 3;"
    y, z = run(
        source, {"a": a, "b": b}, {"y": ((512,), mx.bfloat16), "z": ((512,), mx.float32)}, 512
    )
    assert mx.array_equal(y, a * b + a + mx.array(3, mx.bfloat16))
    assert mx.array_equal(z, a.astype(mx.float32) * b.astype(mx.float32) + 1)
    with pytest.raises(simt.BuildError):
        run("y[0] = 0.5f * a[0];", {"a": a}, {"y": ((1,), mx.bfloat16)}, 1)


def test_literals_are_float_in_templates_too():
    source = """
    auto tenth = 0.1, milli = 1e-3;
    static_assert(sizeof(tenth) == N && sizeof(milli) == N && sizeof(1.5h) == 2, "float");
    static_assert(is_same_v<decltype(2.0bf), bfloat>, "bfloat");
    uint i = thread_position_in_grid.x;
    y[i] = x[i] * 0.1 + .7;
    """
    x = RNG.normal(size=512).astype(np.float32)
    (y,) = run(source, {"x": mx.array(x)}, {"y": ((512,), mx.float32)}, 512,
               call={"template": [("N", 4)]})  # fmt: skip
    assert np.array_equal(np.array(y), x * np.float32(0.1) + np.float32(0.7))


def test_half_rounds_each_operation():
    a, b, c = (RNG.normal(size=256).astype(np.float16) for _ in "abc")
    source = "uint i = thread_position_in_grid.x; half t = a[i] * b[i] + c[i]; y[i] = t / 3.0h;"
    (y,) = run(source, {n: mx.array(v) for n, v in zip("abc", (a, b, c), strict=True)},
               {"y": ((256,), mx.float16)}, 256)  # fmt: skip
    assert np.array_equal(np.array(y), (a * b + c) / np.float16(3))


def test_vectors_swizzles_and_bit_casts():
    source = """
    float4 v = float4(x[0], x[1], float2(x[2], x[3]));
    float4 w = v;
    w.xy = v.zw;
    w.zyx += float3(1, 2, 3);
    float4 m = select(v, w, v < w);
    float3 p = packed_float3(v.wyx);
    uint2 u = as_type<uint2>(half4(v));
    int3 k = int3(v.xyz) << 2;
    y[0] = w.x; y[1] = w.y; y[2] = w.z; y[3] = w.w;
    y[4] = dot(v, w.wzyx); y[5] = m.y; y[6] = p.x; y[7] = as_type<half2>(u.y).x;
    y[8] = k.y; y[9] = any(v.xy > 100.0f); y[10] = length(v.xy); y[11] = fast::exp(v).x;
    y[12] = max(v, 0.0f).x; y[13] = metal::precise::sqrt(abs(v.y)); y[14] = clamp(v.z, -0.5f, 0.5f);
    """
    x = RNG.normal(size=4).astype(np.float32)
    (y,) = run(source, {"x": mx.array(x)}, {"y": ((15,), mx.float32)}, 1)
    a, b, c, d = x
    w = np.float32([c + 3, d + 2, c + 1, d])
    expected = [
        *w, a * w[3] + b * w[2] + c * w[1] + d * w[0], w[1] if b < w[1] else b, d,
        np.float16(c), int(b) << 2, 0, np.hypot(a, b), np.exp(a), max(a, 0), np.sqrt(abs(b)),
        np.clip(c, -0.5, 0.5),
    ]  # fmt: skip
    np.testing.assert_allclose(np.array(y), np.float32(expected), rtol=2e-6, atol=1e-6)


# ---- simd functions


@pytest.mark.parametrize("lanes", [32, 19])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_simd_functions(lanes, order):
    calls = {
        "simd_sum(v)": lambda v: np.full_like(v, v.sum()),
        "simd_product(v)": lambda v: np.full_like(v, v.prod()),
        "simd_max(v)": lambda v: np.full_like(v, v.max()),
        "simd_min(v)": lambda v: np.full_like(v, v.min()),
        "simd_prefix_inclusive_sum(v)": np.cumsum,
        "simd_prefix_exclusive_sum(v)": lambda v: np.cumsum(v) - v,
        "simd_broadcast(v, 3)": lambda v: np.full_like(v, v[3]),
        "simd_broadcast_first(v)": lambda v: np.full_like(v, v[0]),
        "simd_shuffle_up(v, 2)": lambda v: np.concatenate([v[:2], v[:-2]]),
        "simd_shuffle(v, (lane * 7) % 16)": lambda v: v[np.arange(len(v)) * 7 % 16],
        "simd_shuffle_and_fill_up(v, -v, 1)": lambda v: (
            np.append(-v[-1:], v[:-1]) if len(v) == 32 else None
        ),
        "simd_shuffle_rotate_down(v, 5)": lambda v: np.roll(v, -5) if len(v) == 32 else None,
        "quad_sum(v)": lambda v: np.add.reduceat(v, np.arange(0, len(v), 4)).repeat(4)[: len(v)],
        "quad_broadcast(v, 0)": lambda v: v[np.arange(len(v)) & ~3],
        "int(ulong(simd_ballot(v > 0)) & 0x7fffffff)": lambda v: np.full_like(
            v, int(sum(1 << i for i in range(31) if i < len(v) and v[i] > 0))
        ),
        "simd_any(v > 2) + 2 * simd_all(v < 2)": lambda v: np.full_like(
            v, (v > 2).any() + 2 * (v < 2).all()
        ),
    }
    v = RNG.integers(-3, 4, lanes).astype(np.int32)
    wanted = {c: f(v) for c, f in calls.items()}
    wanted = {c: w for c, w in wanted.items() if w is not None}
    lines = [f"y[{n} * {lanes} + lane] = {c};" for n, c in enumerate(wanted)]
    source = "int lane = thread_index_in_simdgroup; int v = x[lane];" + "\n".join(lines)
    with simt.lane_order(order, seed=int(RNG.integers(1 << 30))):
        (y,) = run(source, {"x": mx.array(v)}, {"y": ((len(wanted), lanes), mx.int32)}, lanes)
    for row, (name, want) in zip(np.array(y), wanted.items(), strict=True):
        np.testing.assert_array_equal(row, want, err_msg=name)


def test_only_active_lanes_take_part_in_a_branch():
    source = """
    uint lane = thread_index_in_simdgroup;
    float s = 0;
    if (lane % 3 == 0) s = simd_sum(x[lane]);
    else s = simd_max(x[lane]);
    y[lane] = s;
    """
    x = RNG.normal(size=32).astype(np.float32)
    (y,) = run(source, {"x": mx.array(x)}, {"y": ((32,), mx.float32)}, 32)
    third = np.arange(32) % 3 == 0
    want = np.where(third, x[third].astype(np.float64).sum(), x[~third].max())
    np.testing.assert_allclose(np.array(y), want, rtol=0, atol=32 * 2**-24 * np.abs(x).sum())


def test_a_race_shows_in_the_lane_order():
    source = """
    threadgroup float buf[32];
    uint lane = thread_index_in_simdgroup;
    buf[lane] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    buf[lane] = x[lane];
    BARRIER
    y[lane] = buf[lane ^ 1];
    """
    for barrier, agree in (("threadgroup_barrier(mem_flags::mem_threadgroup);", True), ("", False)):
        seen = []
        for order in ("forward", "reverse"):
            with simt.lane_order(order):
                (y,) = run(
                    source.replace("BARRIER", barrier),
                    {"x": mx.arange(1.0, 33.0)},
                    {"y": ((32,), mx.float32)},
                    32,
                )
            seen.append(y)
        assert mx.array_equal(*seen).item() == agree


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_simdgroup_matrix_product(dtype):
    a, b, c = (mx.random.normal((8, 8)).astype(dtype) for _ in "abc")
    source = """
    simdgroup_matrix<T, 8, 8> A, B, C;
    simdgroup_load(A, a, 8);
    simdgroup_load(B, b, 8, ulong2(0), true);
    simdgroup_load(C, c, 8);
    simdgroup_float8x8 D = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    D.thread_elements() = float2(C.thread_elements()[0], C.thread_elements()[1]);
    simdgroup_multiply_accumulate(D, A, B, D);
    simdgroup_store(D, y, 8);
    """
    (y,) = run(source, {"a": a, "b": b, "c": c}, {"y": ((8, 8), mx.float32)}, 32,
               call={"template": [("T", dtype)]})  # fmt: skip
    a, b, c = (x.astype(mx.float32) for x in (a, b, c))
    terms = mx.abs(a) @ mx.abs(b.T) + mx.abs(c)
    assert mx.all(mx.abs(y - (a @ b.T + c)) <= 2 * 9 * 2**-24 * terms)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_matmul2d(left, right):
    M, N, K = 16, 32, 32
    a, b = (
        mx.random.normal((K, M) if left else (M, K)),
        mx.random.normal((N, K) if right else (K, N)),
    )
    header = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
    source = f"""
    constexpr auto d = mpp::tensor_ops::matmul2d_descriptor({M}, {N}, {K}, {int(left)},
        {int(right)}, true, mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
    mpp::tensor_ops::matmul2d<d, metal::execution_simdgroup> op;
    auto A = op.get_left_input_cooperative_tensor<float, float, float>();
    auto B = op.get_right_input_cooperative_tensor<float, float, float>();
    auto C = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
    uint lane = thread_index_in_simdgroup;
    int wide_a = {a.shape[1]}, wide_b = {b.shape[1]};
    for (int i = 0; i < A.get_capacity(); i++) A[i] = a[A.row(lane, i) * wide_a + A.col(lane, i)];
    for (int i = 0; i < B.get_capacity(); i++) B[i] = b[B.row(lane, i) * wide_b + B.col(lane, i)];
    op.run(A, B, C);
    for (int i = 0; i < C.get_capacity(); i++) y[C.row(lane, i) * {N} + C.col(lane, i)] = C[i];
    """
    (y,) = run(source, {"a": a, "b": b}, {"y": ((M, N), mx.float32)}, 32, header=header)
    a, b = a.T if left else a, b.T if right else b
    assert mx.all(mx.abs(y - a @ b) <= 2 * K * 2**-24 * (mx.abs(a) @ mx.abs(b)))
