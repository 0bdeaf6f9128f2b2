"""What test_upstream runs of the kernels in the headers that the MLX wheel ships."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
from upstream_cases import UNIT, Case, bound, case, delta_inputs, delta_tolerance, normal, rounded

from lily_mlx.runtime import simt


def shipped(*headers: str) -> str:
    return "".join(f'#include "mlx/backend/metal/kernels/{h}"\n' for h in ("utils.h", *headers))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


QUANTIZED = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
QUANTIZED_NAX = (
    "steel/gemm/gemm.h",
    "quantized_utils.h",
    "steel/gemm/nax.h",
    "steel/gemm/loader.h",
    "quantized_nax.h",
)


def quantized_case(headers, kernel, bits, M, K, N, first_scalar, grid, threadgroup, dtype="float"):
    kind = mx.bfloat16 if dtype == "bfloat16_t" else mx.float32
    x, w = normal(M, K, dtype=kind), normal(N, K, dtype=kind)
    packed, scales, biases = mx.quantize(w, 64, bits)
    exact = mx.dequantize(packed, *(a.astype(mx.float32) for a in (scales, biases)), 64, bits)
    x32 = x.astype(mx.float32)
    reference = x32 @ exact.T
    run = simt.function(shipped(*headers), kernel, name=kernel)
    no_batch = {i: np.zeros(1, np.int64) for i in range(first_scalar, first_scalar + 8)}
    buffers = {0: packed, 1: scales, 2: biases, 3: x, 5: ints(K), 6: ints(N), **no_batch}
    if first_scalar == 8:
        buffers[7] = ints(M)
    call = partial(
        run, buffers=buffers, outputs={4: ((M, N), kind)}, grid=grid, threadgroup=threadgroup
    )
    # The kernel sums scale * q and bias apart, so the terms are as large as those two.
    spread = mx.abs(biases).astype(mx.float32) + 2**bits * mx.abs(scales).astype(mx.float32)
    terms = mx.abs(x32) @ mx.repeat(spread, 64, axis=1).T
    return Case(call, [reference], [bound(K, terms) + rounded(kind, reference)])


for _bits in (4, 8):
    for _type in ("float", "bfloat16_t"):
        case(f"affine_qmv_fast, {_bits} bits, {_type}")(
            lambda u, b=_bits, t=_type: quantized_case(
                QUANTIZED,
                f"affine_qmv_fast<{t}, 64, {b}, false>",
                b,
                1,
                512,
                72,
                7,
                (32, 2 * 9, 1),
                (32, 2, 1),
                t,
            )
        )
case("affine_qmv, 4 bits")(
    lambda u: quantized_case(
        QUANTIZED, "affine_qmv<float, 64, 4, false>", 4, 1, 320, 77, 7, (32, 2 * 10, 1), (32, 2, 1)
    )
)
case("affine_qmm_t, 4 bits")(
    lambda u: quantized_case(
        QUANTIZED,
        "affine_qmm_t<float, 64, 4, false, false>",
        4,
        37,
        192,
        77,
        8,
        (32 * 3, 2 * 2, 2),
        (32, 2, 2),
    )
)
case("affine_qmm_t_nax, 4 bits")(
    lambda u: quantized_case(
        QUANTIZED_NAX,
        "affine_qmm_t_nax<float, 64, 4, false, false>",
        4,
        37,
        192,
        77,
        8,
        (32 * 2, 2 * 1, 2),
        (32, 2, 2),
    )
)


def sdpa_case(kind, dtype, causal):
    B, H, Hk, L, N, D = 1, 4, 2, 2, 77, 64
    q, k, v = normal(B, H, L, D, dtype=dtype), *(normal(B, Hk, N, D, dtype=dtype) for _ in "kv")
    scale = D**-0.5
    wide = [a.astype(mx.float32) for a in (q, k, v)]
    mask = "causal" if causal else None
    reference = mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask)
    constants = {20: 0, 21: 0, 22: causal, 23: 0, 24: 0, 25: 0}
    run = simt.function(shipped("sdpa_vector.h"), f"sdpa_vector<{kind}, {D}>", constants=constants)
    strides = [np.array([s], np.uint64) for s in (N * D, D, N * D, D)]
    buffers = {0: q, 1: k, 2: v, 4: ints(H // Hk), 5: ints(N), **dict(enumerate(strides, 6))}
    buffers[10] = np.array([scale], np.float32)
    call = partial(
        run,
        buffers=buffers,
        outputs={3: ((B, H, L, D), dtype)},
        grid=(1024 * B * H, L, 1),
        threadgroup=(1024, 1, 1),
    )
    # A score's error goes into the weights as a factor.
    score = mx.max(mx.linalg.norm(wide[0], axis=-1)) * mx.max(mx.linalg.norm(wide[1], axis=-1))
    slack = bound(D, scale * score.item()) + bound(N, 1)
    return Case(call, [reference], [slack * mx.max(mx.abs(wide[2])) + rounded(dtype, reference)])


case("sdpa_vector, fp32")(lambda u: sdpa_case("float", mx.float32, 0))
case("sdpa_vector, bf16, causal")(lambda u: sdpa_case("bfloat16_t", mx.bfloat16, 1))


def attention_case(headers, kernel, kind, dtype, BQ, BK, D, causal):
    """MLX's tiled attention: rows that do not fill the last query and key tiles."""
    B, H, Hk, L, N = 1, 2, 1, 45, 77
    q, k, v = normal(B, H, L, D, dtype=dtype), *(normal(B, Hk, N, D, dtype=dtype) for _ in "kv")
    scale = D**-0.5
    wide = [a.astype(mx.float32) for a in (q, k, v)]
    mask = "causal" if causal else None
    reference = mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask)
    tiles = -(-L // BQ), -(-N // BK)
    fields = [B, H, D, L, N, H // Hk, scale, *tiles, L // BQ, N // BK, L % BQ, N % BK, N - L]
    strides = [H * L * D, L * D, D, *(Hk * N * D, N * D, D) * 2, H * L * D, L * D, D]
    params = np.array(
        [(*fields, *strides)], ",".join(["i4"] * 6 + ["f4"] + ["i4"] * 7 + ["i8"] * 12)
    )
    run = simt.function(
        shipped(*headers),
        f"{kernel}<{kind}, {BQ}, {BK}, {D}, {D}, 4, 1, bool, float>",
        constants={200: 0, 201: 0, 300: 0, 301: causal, 302: 0, 303: 0},
    )
    call = partial(
        run,
        buffers={0: q, 1: k, 2: v, 4: params.tobytes()},
        outputs={3: ((B, H, L, D), dtype)},
        grid=(32 * tiles[0], 4 * H, B),
        threadgroup=(32, 4, 1),
    )
    score = mx.max(mx.linalg.norm(wide[0], axis=-1)) * mx.max(mx.linalg.norm(wide[1], axis=-1))
    slack = bound(D, scale * score.item()) + bound(N, 1)
    # Rounded to the type: the scaled query (which moves a score), the weights, and the result.
    lost = UNIT[dtype] * (2 + 2 * scale * score.item()) if dtype != mx.float32 else 0.0
    tolerance = (slack + lost) * mx.max(mx.abs(wide[2])) + rounded(dtype, reference)
    return Case(call, [reference], [tolerance])


case("attention (steel), fp32")(
    lambda u: attention_case(
        ("steel/attn/kernels/steel_attention.h",), "attention", "float", mx.float32, 32, 16, 128, 0
    )
)
case("attention_nax, bf16, causal")(
    lambda u: attention_case(
        (
            "steel/attn/attn.h",
            "steel/attn/nax.h",
            "steel/attn/params.h",
            "steel/attn/kernels/steel_attention_nax.h",
        ),
        "attention_nax",
        "bfloat16_t",
        mx.bfloat16,
        64,
        32,
        64,
        1,
    )
)


@case("softmax_single_row")
def softmax(upstream):
    x = normal(3, 1001) * 4
    run = simt.function(shipped("softmax.h"), "softmax_single_row<float>")
    call = partial(
        run,
        buffers={0: x, 2: ints(1001)},
        outputs={1: (x.shape, mx.float32)},
        grid=(3 * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )
    reference = mx.softmax(x, axis=-1)
    return Case(call, [reference], [bound(1001, 1) * reference + bound(4, 16) * reference])


@case("logsumexp")
def logsumexp(upstream):
    x = normal(3, 1001)
    run = simt.function(shipped("logsumexp.h"), "logsumexp<float>")
    call = partial(
        run,
        buffers={0: x, 2: ints(1001)},
        outputs={1: ((3,), mx.float32)},
        grid=(3 * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )
    return Case(call, [mx.logsumexp(x, axis=-1)], [bound(1001, 1) + bound(4, 8)])


def delta_header_case(upstream, header, kernel, rows, extra=(), simd_orders=False):
    B, T, Hk, Hv, Dk, Dv = 1, 21, 1, 2, 64, 64
    arrays = delta_inputs(B, T, Hk, Hv, Dk, Dv)
    references = list(upstream.delta.gated_delta_ops(*arrays))
    q, k, v, g, beta, state = arrays
    run = simt.function(shipped(header), kernel.format(f"float, {Dk}, {Dv}, {Hk}, {Hv}"))
    buffers = {0: q, 1: k, 2: v, 3: state, 4: g, 5: beta, 8: ints(T)}
    buffers |= {i: np.zeros(1, np.float32) for i in extra}
    call = partial(
        run,
        buffers=buffers,
        outputs={6: (v.shape, mx.float32), 7: (state.shape, mx.float32)},
        grid=(32, Dv // rows, B * Hv),
        threadgroup=(32, 4, 1),
    )
    # The chunked forms divide by decays again: exp of a difference of log sums.
    return Case(call, references, [4 * t for t in delta_tolerance(arrays, T)], simd_orders)


case("gated_delta_seq")(
    lambda u: delta_header_case(u, "gated_delta_update.h", "gated_delta_seq<{}, 16>", 1)
)
case("gated_delta_fused_chunk")(
    lambda u: delta_header_case(
        u, "gated_delta_update.h", "gated_delta_fused_chunk<{}, 8>", 8, simd_orders=True
    )
)
case("gated_delta_fused_nax")(
    lambda u: delta_header_case(
        u, "gated_delta_update_nax.h", "gated_delta_fused_nax<{}, 16, 4>", 16, (9, 10, 11), True
    )
)
