"""Metal's functions give the same on each backend, and mlx_lm's own Metal text runs there too.

`pytest -m cuda` is the part for a machine with MLX's CUDA build.
"""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import nvrtc
import pytest
from backend_cases import each_backend, fresh_key, gated_delta_kernels, metal_kernel, running
from kernels import KERNELS
from mlx_lm.models.gated_delta import gated_delta_ops

from lily_mlx.runtime import backends, guard

LANES = np.arange(64) % 32


def _scan(x, exclusive):
    sums = np.concatenate([np.cumsum(half) for half in np.split(x, 2)])
    return sums - x if exclusive else sums


def _per_simdgroup(f):
    return lambda x: np.concatenate([np.full(32, f(half)) for half in np.split(x, 2)])


def _from(index):
    return lambda x: np.concatenate([half[index] for half in np.split(x, 2)])


# Metal expression of v = x[i] (float), n = int(x[i]) and t = T(x[i]), and its value in numpy.
# x has whole numbers up to 8, exact in each type.
SEMANTICS = {
    "simd_sum(v)": _per_simdgroup(np.sum),
    "float(simd_max(t))": _per_simdgroup(np.max),
    "simd_min(n)": _per_simdgroup(np.min),
    "simd_sum(float2(v, 1)).y + simd_max(half(v))": lambda x: 32 + _per_simdgroup(np.max)(x),
    "simd_or(uint(n))": _per_simdgroup(lambda h: np.bitwise_or.reduce(h.astype(int))),
    "simd_xor(n)": _per_simdgroup(lambda h: np.bitwise_xor.reduce(h.astype(int))),
    "simd_prefix_inclusive_sum(v)": lambda x: _scan(x, False),
    "simd_prefix_exclusive_sum(n)": lambda x: _scan(x, True),
    "float(simd_shuffle_xor(t, 5))": _from(np.arange(32) ^ 5),
    "simd_shuffle(v, 31 - lane)": _from(np.arange(32)[::-1]),
    "select(0.0f, simd_shuffle_down(v, 3), lane < 29)": lambda x: np.concatenate(
        [np.append(half[3:], [0] * 3) for half in np.split(x, 2)]
    ),
    "select(0.0f, simd_shuffle_up(v, 1), lane > 0)": lambda x: np.concatenate(
        [np.append([0], half[:-1]) for half in np.split(x, 2)]
    ),
    "simd_shuffle_xor(float4(v, 1, 2, 3), 1).x": _from(np.arange(32) ^ 1),
    "simd_broadcast(v, 7)": _from([7] * 32),
    "float(simd_broadcast_first(t))": _from([0] * 32),
    "popcount(uint(ulong(simd_ballot(n > 4))))": _per_simdgroup(lambda h: np.sum(h > 4)),
    "simd_any(n > 7) + 2 * simd_all(n >= 0)": _per_simdgroup(lambda h: np.any(h > 7) + 2),
    "float(lane + 100 * sg + 1000 * tid.y)": lambda x: (
        LANES + 100 * np.repeat([0, 1], 32) + 1000 * (np.arange(64) // 16 % 4)
    ),
    "float(thread_index_in_threadgroup + simdgroups_per_threadgroup + threads_per_simdgroup)": (
        lambda x: np.arange(64) + 34
    ),
    "float(threads_per_threadgroup.y + threads_per_grid.x + threadgroups_per_grid.x)": lambda x: (
        np.full(64, 4 + 16 + 1)
    ),
    "float4(float4(v, 2, 3, 4).wzyx).w": lambda x: x,
    "dot(float3(v, 1, 2).zxy, float3(1, 1, 10))": lambda x: 2 + x + 10,
    "(float4(half4(half(v))) * 2.0f + float4(1)).z": lambda x: 2 * x + 1,
    "float(half2(float2(v, 3)).x) + float(bfloat4(float4(v)).w)": lambda x: 2 * x,
    "float(as_type<half2>(as_type<uint>(half2(half(v), half(9)))).x)": lambda x: x,
    "as_type<float>(as_type<uint>(v))": lambda x: x,
    "float((uint4(uint(n), 2, 3, 4) >> 1u).x) + float((uint2(12u) & uint2(6u, 4u)).x)": (
        lambda x: x.astype(int) // 2 + 4
    ),
    "float(min(n, 3) + max(2u, uint(n))) + clamp(v, 1.0f, 4.0f) + abs(-n)": lambda x: (
        np.minimum(x, 3) + np.maximum(x, 2) + np.clip(x, 1, 4) + x
    ),
    "select(1.0f, 5.0f, n > 3) + sign(v - 4) + mix(v, v + 2, 0.5f)": lambda x: (
        np.where(x > 3, 5, 1) + np.sign(x - 4) + x + 1
    ),
    "fma(v, 3.0f, 1.0f) + rint(v + 0.25f) + floor(v * 0.5f)": lambda x: (
        3 * x + 1 + x + np.floor(x / 2)
    ),
    "float(t * t + T(1)) + float(t * 2)": lambda x: x * x + 1 + 2 * x,
    "float(t) * v + t * v": lambda x: 2 * x * x,
    "1 / 2 + 0.1 * 10": lambda x: np.ones(64),
    "isnan(NAN) + 2 * isinf(INFINITY) + 4 * isinf(v)": lambda x: np.full(64, 3),
    "shared[(i + 32) % 64] + float(COUNT)": lambda x: np.roll(x, 32) + 64,
    "TABLE[n % 3] + TWICE(v)": lambda x: np.array([1.5, 2.5, 3.5])[x.astype(int) % 3] + 2 * x,
    "helper(x, local, i)": lambda x: x + x % 4,
}
APPROXIMATE = {
    "exp(-v)": lambda x: np.exp(-x),
    "precise::exp2(v * 0.3f) + metal::precise::rsqrt(v + 1)": lambda x: (
        np.exp2(x * np.float32(0.3)) + 1 / np.sqrt(x + 1)
    ),
    "log(v + 1) + log2(v + 1) + sqrt(v) + tanh(v) + pow(v + 1, 0.3f)": lambda x: (
        np.log1p(x) + np.log2(x + 1) + np.sqrt(x) + np.tanh(x) + (x + 1) ** np.float32(0.3)
    ),
}
FAST = {
    "fast::exp(v * 0.1f) + metal::fast::cos(v * 0.25f)": lambda x: np.exp(x / 10) + np.cos(x / 4),
}
# Metal promises 2^-13 of fast::cos; the other functions are good to 16 units in the last place.
TOLERANCE = {**dict.fromkeys(SEMANTICS, 0), **dict.fromkeys(APPROXIMATE, 4e-6)}
TOLERANCE |= dict.fromkeys(FAST, 2**-12)
HEADER = """
#define TWICE(x) ((x) * 2.0)
#define COUNT atomic_load_explicit(&counts[0], memory_order_relaxed)
constant constexpr float TABLE[3] = {1.5, 2.5, 3.5};
struct Pair { float a, b; float sum() const { return a + b; } };
template <typename U>
inline float helper(const device U* p, thread float* q, uint i) {
  Pair pair = {float(p[i]), q[int(p[i]) % 4]};
  return pair.sum();
}
"""
BODY = """
  const uint i = thread_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const uint3 tid = thread_position_in_threadgroup;
  const float v = float(x[i]);
  const int n = int(v);
  const T t = T(v);
  threadgroup float shared[64];
  threadgroup atomic_uint counts[2];
  float local[4] = {0, 1, 2, 3};
  if (i == 0) atomic_store_explicit(&counts[0], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[i] = v;
  atomic_fetch_add_explicit(&counts[0], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""


@each_backend
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_metals_functions(backend, dtype):
    expressions = {**SEMANTICS, **APPROXIMATE, **FAST}
    body = BODY
    for k, expression in enumerate(expressions):
        body += f"  out[{64 * k} + i] = {expression};\n"
    kernel = metal_kernel(backend)(
        name="semantics", input_names=["x"], output_names=["out"], source=body, header=HEADER
    )
    x = mx.random.randint(0, 9, (64,), key=fresh_key())
    with running(backend):
        (out,) = kernel(
            inputs=[x.astype(dtype)],
            template=[("T", dtype)],
            grid=(16, 4, 1),
            threadgroup=(16, 4, 1),
            output_shapes=[(len(expressions), 64)],
            output_dtypes=[mx.float32],
        )
    values = np.array(x).astype(np.float64)
    for got, (expression, wanted) in zip(np.array(out), expressions.items(), strict=True):
        tolerance = TOLERANCE[expression]
        np.testing.assert_allclose(
            got, wanted(values), rtol=tolerance, atol=tolerance, err_msg=expression
        )


@each_backend
@pytest.mark.parametrize("kind", ["step", "mask", "vector", "packed"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gated_delta_text_of_mlx_lm(backend, kind, dtype):
    """mlx_lm's Metal text against its own loop over tokens, in fp32."""
    B, T, Hk, Hv, Dk, Dv = 2, 7, 2, 4, 128, 64
    keys = mx.random.split(fresh_key(), 7)
    q, k = (mx.random.normal((B, T, Hk, Dk), key=key) * Dk**-0.5 for key in keys[:2])
    v = mx.random.normal((B, T, Hv, Dv), key=keys[2])
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    g = mx.random.uniform(0.8, 1.0, (B, T, Hv, *[Dk] * (kind == "vector")), key=keys[3])
    beta = mx.random.uniform(0, 1, (B, T, Hv), key=keys[4]).astype(dtype)
    state = mx.random.normal((B, Hv, Dv, Dk), key=keys[5])
    mask = mx.random.uniform(0, 1, (B, T), key=keys[6]) < 0.7 if kind == "mask" else None
    rows = 8 if kind == "packed" else 1
    y, after = gated_delta_kernels(metal_kernel(backend))[kind](
        inputs=[q, k, v, g, beta, state, T, *([mask] if kind == "mask" else [])],
        template=[
            ("InT", dtype), ("StT", mx.float32), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv),
        ],
        grid=(32, Dv // rows, B * Hv),
        threadgroup=(32, 4, 1),
        output_shapes=[(B, T, Hv, Dv), state.shape],
        output_dtypes=[dtype, mx.float32],
    )  # fmt: skip
    wide = [a.astype(mx.float32) for a in (q, k, v, g, beta, state)]
    wanted, wanted_state = gated_delta_ops(*wide, mask)
    if mask is not None:  # the loop leaves what it skips undefined, the kernel writes zeros
        wanted = mx.where(mask[..., None, None], wanted, 0)
        y = mx.where(mask[..., None, None], y, 0)
    # Sums of 128 products: 128 roundings of 2^-24 each at worst, then one to the dtype.
    for got, want, eps in ((y, wanted, mx.finfo(dtype).eps), (after, wanted_state, 2**-23)):
        peak = mx.abs(want).max().item()
        error = mx.abs(got.astype(mx.float32) - want).max().item()
        assert error <= peak * (eps / 2 + T * 128 * 2**-24)


@pytest.mark.cuda
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs MLX's CUDA build and a GPU")
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.op.name)
def test_the_compiled_text_is_the_one_mlx_writes(row, capfd, monkeypatch):
    """`nvrtc.kernel_text`, which CI compiles, against what the CUDA build prints."""
    texts = nvrtc.recorded(monkeypatch)
    with backends.using("cuda", verbose=True):
        mx.eval(guard.as_list(row.op.launch(*row.op.inputs(fresh_key(), *row.variants[-1]))))
    printed = re.findall(r"^```\n(.*?)\n```$", capfd.readouterr().out, re.M | re.S)
    assert printed == texts and texts


def test_semantics_cover_the_header():
    """No simd function of the CUDA header is left untried."""
    header = (backends.source.Path(backends.__file__).parent / "msl_cuda.h").read_text()
    named = set(re.findall(r"\b(simd_(?!vote|is_first|product|and)\w+)\(", header))
    named |= set(re.findall(r"MSL_(?:MOVE|REDUCE)\((simd_(?!product|and)\w+),", header))
    missing = {name for name in named if f"{name}(" not in " ".join(SEMANTICS)}
    assert named and not missing
