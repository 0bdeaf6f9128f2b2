"""What a recorded run counts, the cache of builds, and kernels of any MSL text."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from conftest import SEED

from lily_mlx.runtime import simt
from lily_mlx.runtime.simt import build

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package"
)
RNG = np.random.default_rng(SEED)
ROWS = int(RNG.integers(2, 6))
N = 32 * 8 * ROWS


def counts(source, n_in=N, threads=N, dtype=mx.float32, **options):
    """The one row of y = f(x), and y."""
    kernel = simt.metal_kernel("counted", ["x"], ["y"], source)
    with simt.record(**options) as report:
        (y,) = kernel(
            inputs=[mx.random.normal((n_in,)).astype(dtype)],
            grid=(threads, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(threads,)],
            output_dtypes=[dtype],
        )
    report.assert_clean()
    (row,) = report.table()
    return row, y


@pytest.mark.parametrize("stride", [1, 2, 8, 32, 100])
def test_lines_of_a_strided_read(stride):
    source = f"uint i = thread_position_in_grid.x; y[i] = x[i * {stride}];"
    row, _ = counts(source, n_in=N * stride)
    x, y = row["buffers"]["x"], row["buffers"]["y"]
    assert x["loaded"] == y["stored"] == 4 * N
    assert (x["stored"], y["loaded"]) == (0, 0)
    lanes = np.arange(N).reshape(-1, 32) * stride * 4 // 128
    assert x["lines"] == sum(len(set(r)) for r in lanes.tolist())
    assert x["fewest_lines"] == y["lines"] == y["fewest_lines"] == N // 32
    assert x["coalescing"] == x["fewest_lines"] / x["lines"]
    assert y["coalescing"] == 1 and y["unwritten"] == 0


def test_a_loop_of_reads_is_counted_by_turn():
    """Lanes run one after another, but a line is shared by what they read in the same turn."""
    source = """
    uint i = thread_position_in_grid.x;
    float s = 0;
    for (int k = 0; k < 8; k++) s += x[k * 32 + i % 32];
    y[i] = s;
    """
    row, _ = counts(source)
    x = row["buffers"]["x"]
    assert x["loaded"] == 8 * 4 * N
    assert x["lines"] == x["fewest_lines"] == 8 * N // 32


def test_a_broadcast_is_one_line_and_a_wide_vector_four():
    row, _ = counts("uint i = thread_position_in_grid.x; y[i] = x[i / 64];")
    assert row["buffers"]["x"]["lines"] == row["buffers"]["x"]["fewest_lines"] == N // 32
    source = """
    uint i = thread_position_in_grid.x;
    float4 v = ((const device float4*)x)[i];
    y[i] = (v.x + v.y) + (v.z + v.w);
    """
    row, _ = counts(source, n_in=4 * N)
    x = row["buffers"]["x"]
    assert x["lines"] == x["fewest_lines"] == x["loaded"] // 128 == 4 * N // 32
    assert row["float_operations"] == 3 * N


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_float_operations(dtype):
    source = """
    uint i = thread_position_in_grid.x;
    auto v = x[i];
    y[i] = v * v + v / v;
    """
    row, _ = counts(source, dtype=dtype)
    assert row["float_operations"] == 3 * N
    source = """
    uint i = thread_position_in_grid.x;
    float v = x[i];
    y[i] = decltype(y[0] + y[0])(metal::exp(metal::fma(v, v, v)));
    """
    row, _ = counts(source.replace("decltype(y[0] + y[0])", ""))
    assert row["float_operations"] == 3 * N


def test_barriers_simd_operations_and_threadgroup_memory():
    source = """
    threadgroup float a[64], b[64][2];
    uint t = thread_position_in_threadgroup.x;
    a[t] = x[thread_position_in_grid.x];
    b[t][1] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s = simd_sum(a[t ^ 1]) + simd_max(b[t ^ 2][1]);
    threadgroup_barrier(mem_flags::mem_none);
    y[thread_position_in_grid.x] = simd_broadcast(s, 0);
    """
    row, _ = counts(source)
    assert row["barriers"] == 2 * N // 64
    assert row["simd_operations"] == 3 * N // 32
    assert row["threadgroup_bytes"] == 64 * 4 + 64 * 2 * 4
    assert row["threadgroup_loaded"] == row["threadgroup_stored"] == 2 * 4 * N


def test_too_much_threadgroup_memory_is_refused():
    source = "threadgroup float big[8200]; big[0] = x[0]; y[thread_position_in_grid.x] = big[0];"
    with pytest.raises(ValueError, match="32800 bytes of threadgroup memory"):
        counts(source)


def test_private_arrays_beyond_the_stack_are_refused():
    source = """
    float big[70000];
    uint i = thread_position_in_grid.x;
    for (uint k = 0; k < 70000; k++) big[k * 3 % 70000] = x[k % 64];
    y[i] = big[i * 31 % 70000];
    """
    with pytest.raises(RuntimeError, match="counted: a thread needs more than 256 KB of stack"):
        counts(source, threads=1)


def test_a_matrix_product_counts_its_multiply_adds():
    source = """
    simdgroup_float8x8 A, C = make_filled_simdgroup_matrix<float, 8>(0.0f);
    simdgroup_load(A, x, 8);
    simdgroup_multiply_accumulate(C, A, A, C);
    if (thread_position_in_grid.x < 32) simdgroup_store(C, y, 8);
    """
    row, _ = counts(source)
    assert row["float_operations"] == 1024 * N // 32
    assert row["buffers"]["y"]["unwritten"] == 4 * (N - 64)


def test_only_recorded_launches_are_in_the_report():
    kernel = simt.metal_kernel("counted", ["x"], ["y"], "y[0] = x[0];")
    call = {
        "inputs": [mx.ones(8)],
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [mx.float32],
    }
    kernel(**call)
    with simt.record() as report:
        kernel(**call)
        with simt.record() as inner:
            kernel(**call)
            kernel(**call)
    kernel(**call)
    assert (len(report.rows), len(inner.rows)) == (1, 2)


def test_a_stopped_launch_says_so_and_counts_can_do_without_faults():
    kernel = simt.metal_kernel("counted", ["x"], ["y"], "y[0] = x[0]; y[1] = x[99];")
    for check in (True, False):
        with simt.record(check=check) as report:
            (y,) = kernel(
                inputs=[mx.ones(8)],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(2,)],
                output_dtypes=[mx.float32],
            )
        assert report.rows[0].aborted
        assert [f.kind for f in report.faults] == ["out_of_bounds"] * check
        assert y[0] == 1 and mx.isnan(y[1])


# ---- kernels of any text

LIBRARY = """
#include <metal_stdlib>
using namespace metal;
constant int shift [[function_constant(3)]];
constant bool twice [[function_constant(4)]];
constant float table[4] = {1, 2, 4, 8};
struct Params { int n; float scale; };

template <typename T>
[[kernel]] void turn(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(2)]],
    constant Params& params [[buffer(1)]],
    threadgroup T* shared [[threadgroup(0)]],
    uint t [[thread_position_in_threadgroup]],
    ushort2 group [[threadgroup_position_in_grid]]) {
  shared[t] = x[group.x * params.n + t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  T v = shared[(t + shift) % params.n] * params.scale * table[t % 4];
  y[group.x * params.n + t] = is_function_constant_defined(twice) && twice ? v + v : v;
}
"""


@pytest.mark.parametrize("constants", [{3: 5}, {3: 1, 4: True}, {3: 0, 4: False}])
def test_function_runs_a_kernel_of_any_text(constants):
    x = mx.random.normal((3, 48))
    turn = simt.function(LIBRARY, "turn<float>", constants=constants)
    call = {
        "buffers": {0: x, 1: np.array([(48, 0.5)], "i4,f4").tobytes()},
        "outputs": {2: (x.shape, mx.float32)},
        "grid": (3 * 48, 1, 1),
        "threadgroup": (48, 1, 1),
        "threadgroup_bytes": {0: 48 * 4},
    }
    (plain,) = turn(**call)
    with simt.record() as report:
        (checked,) = turn(**call)
    report.assert_clean()
    table = np.float32([1, 2, 4, 8])[np.arange(48) % 4]
    want = np.roll(np.array(x), -constants[3], axis=1) * np.float32(0.5) * table
    want *= 2 if constants.get(4) else 1
    assert np.array_equal(np.array(plain), want)
    assert np.array_equal(np.array(checked), want)
    with simt.record() as report:
        turn(**(call | {"threadgroup_bytes": {0: 47 * 4}}))
    assert [f.kind for f in report.faults] == ["out_of_bounds"]
    assert "threadgroup argument 0" in report.faults[0].detail


def test_function_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="no kernel named 'twist'"):
        simt.function(LIBRARY, "twist<float>")
    with pytest.raises(FileNotFoundError, match=r"lib:1: no include directory has missing.h"):
        simt.function('#include "missing.h"\n' + LIBRARY, "turn<float>", name="lib")
    turn = simt.function(LIBRARY, "turn<float>")
    sizes = {"grid": (48, 1, 1), "threadgroup": (48, 1, 1), "outputs": {2: ((48,), mx.float32)}}
    with pytest.raises(ValueError, match="turn: no buffer given for params"):
        turn(buffers={0: mx.zeros(48)}, **sizes)
    with pytest.raises(ValueError, match="turn has no buffer 9"):
        turn(buffers={0: mx.zeros(48), 1: b"", 9: mx.zeros(1)}, **sizes)
    with pytest.raises(ValueError, match="32769 bytes of threadgroup memory"):
        turn(buffers={0: mx.zeros(48), 1: b""}, threadgroup_bytes={0: 32769}, **sizes)


# ---- the cache


@pytest.fixture
def fresh_cache():
    build.cache_dir.cache_clear()
    yield
    build.cache_dir.cache_clear()


def test_builds_are_kept_and_found_again(fresh_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("LILY_CACHE_DIR", str(tmp_path))
    run = []
    monkeypatch.setattr(build, "_run", lambda args, real=build._run: (run.append(args), real(args)))
    for expected in (True, False):
        run.clear()
        turn = simt.function(LIBRARY, "turn<float>")
        turn(
            buffers={0: mx.zeros(48), 1: np.array([(48, 1)], "i4,f4").tobytes()},
            outputs={2: ((48,), mx.float32)},
            grid=(48, 1, 1),
            threadgroup=(48, 1, 1),
            threadgroup_bytes={0: 192},
        )
        assert bool(run) is expected
    assert [f.suffix for f in (tmp_path / "simt").iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_one(
    fresh_cache, monkeypatch, tmp_path
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LILY_CACHE_DIR", str(blocked))
    path = build.cache_dir()
    assert path.is_dir() and blocked not in path.parents
