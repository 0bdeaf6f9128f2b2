"""Gated attention of a few new tokens: before it, and over a key-value cache."""

from __future__ import annotations

import functools
import math

import mlx.core as mx

from ..device import tuned
from ..runtime import kernel, op, scalar

MAX_TOKENS = 8
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


def attn_prep_reference(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    offsets: mx.array,
    heads: tuple[int, int],
    rotary: int,
    base: float,
    eps: float = 1e-6,
    gated: bool = True,
) -> tuple[mx.array, mx.array, mx.array]:
    """`attn_prep` in plain MLX, operation by operation as MLX-LM has it."""
    B, L, _ = proj.shape
    Hq, Hk = heads
    D = q_norm.shape[0]
    width = Hq * D * (2 if gated else 1)
    q = proj[..., :width].reshape(B, L, Hq, -1)[..., :D]
    k, v = mx.split(proj[..., width:].reshape(B, L, 2 * Hk, D), 2, axis=2)
    q = mx.fast.rms_norm(q, q_norm, eps).transpose(0, 2, 1, 3)
    k = mx.fast.rms_norm(k, k_norm, eps).transpose(0, 2, 1, 3)
    q, k = (
        mx.fast.rope(x, rotary, traditional=False, base=base, scale=1.0, offset=offsets)
        for x in (q, k)
    )
    return q, k, v.transpose(0, 2, 1, 3)


def _prep_variant(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    offsets: mx.array,
    heads: tuple[int, int],
    rotary: int,
    base: float,
    eps: float = 1e-6,
    gated: bool = True,
) -> tuple | None:
    dtype, D = proj.dtype, q_norm.shape[0]
    Hq, Hk = heads
    fits = (
        dtype in _FLOATS
        and q_norm.dtype == k_norm.dtype == dtype
        and k_norm.shape[0] == D
        and proj.size
        and proj.ndim == 3
        and proj.shape[2] == (Hq * (2 if gated else 1) + 2 * Hk) * D
        and 8 <= D <= 1024
        and 0 < rotary <= D
        and rotary % 2 == 0
        and offsets.dtype == mx.int32
        and offsets.ndim == 1
        and offsets.size in (1, proj.shape[0])
    )
    return (dtype, D, Hq, Hk, rotary, gated) if fits else None


def attn_prep_inputs(
    key: mx.array,
    dtype: mx.Dtype,
    D: int,
    Hq: int,
    Hk: int,
    rotary: int,
    gated: bool,
    lead: tuple[int, int] = (2, 3),
    reach: int = 16,
) -> tuple:
    """Random arguments: proj (*lead, ...), offsets (lead[0],) below `reach`, norms near 1."""
    keys = mx.random.split(key, 4)
    width = (Hq * (2 if gated else 1) + 2 * Hk) * D
    proj = mx.random.normal((*lead, width), key=keys[0]).astype(dtype)
    norms = [(1 + 0.1 * mx.random.normal((D,), key=k)).astype(dtype) for k in keys[1:3]]
    offsets = mx.random.randint(0, reach, lead[:1], key=keys[3])
    return proj, *norms, offsets, (Hq, Hk), rotary, 1e7, 1e-6, gated


def _prep_bytes(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    offsets: mx.array,
    heads: tuple[int, int],
    rotary: int,
    base: float,
    eps: float = 1e-6,
    gated: bool = True,
) -> int:
    rows, (Hq, Hk) = proj.shape[0] * proj.shape[1], heads
    moved = 2 * rows * (Hq + 2 * Hk) * q_norm.nbytes
    return moved + q_norm.nbytes + k_norm.nbytes + offsets.nbytes


@op(
    reference=attn_prep_reference,
    variant=_prep_variant,
    inputs=attn_prep_inputs,
    bytes=_prep_bytes,
)
def attn_prep(
    proj: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    offsets: mx.array,
    heads: tuple[int, int],
    rotary: int,
    base: float,
    eps: float = 1e-6,
    gated: bool = True,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys normed and turned, values copied, heads first. Source: Qwen3NextAttention.

    Args:
        proj: (B, L, (2 * Hq + 2 * Hk) * D), what q_proj, k_proj and v_proj give, side by side: each
            query head is followed by its gate; without gates (B, L, (Hq + 2 * Hk) * D). float32,
            float16 or bfloat16.
        q_norm, k_norm: (D,), proj.dtype, D at most 1024.
        offsets: (B,) or (1,) int32, positions before the first token; an array, so that a trace
            of the call serves every position.
        heads: (Hq, Hk).
        rotary: dimensions that `mx.fast.rope` turns, even, traditional=False, scale=1.
        base: of rope's frequencies.
        eps: added to the mean square.
        gated: whether proj has gates; they are left there, for `attn_decode`.
    Returns: q (B, Hq, L, D), k and v (B, Hk, L, D), proj.dtype. fp32, rounded once. With other
        dtypes or shapes the reference serves.
    Cost: 1 launch, 2 * B * L * (Hq + 2 * Hk) * D * itemsize bytes.
    """
    B, L, _ = proj.shape
    Hq, Hk = heads
    D = q_norm.shape[0]
    count = Hq + 2 * Hk
    return tuple(
        kernel("attn_prep")(
            inputs=[
                proj,
                q_norm,
                k_norm,
                offsets,
                scalar(math.log2(base)),
                scalar(eps),
                scalar(L, mx.int32),
            ],
            template={"T": proj.dtype, "D": D, "HQ": Hq, "HK": Hk, "ROT": rotary, "GATED": gated},
            grid=(32, count, B * L),
            threadgroup=(32, math.gcd(count, tuned("attn_prep")["heads"]), 1),
            output_shapes=[(B, Hq, L, D), (B, Hk, L, D), (B, Hk, L, D)],
            output_dtypes=[proj.dtype] * 3,
        )
    )


def attn_decode_reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    gate: mx.array | None = None,
    lengths: mx.array | None = None,
) -> mx.array:
    """`attn_decode` in plain MLX, operation by operation as MLX-LM has it."""
    B, Hq, L, D = q.shape
    mask = None if L == 1 else "causal"
    if lengths is not None:
        last = lengths.reshape(-1, 1, 1, 1) - L + mx.arange(L)[:, None]
        mask = mx.arange(k.shape[2]) <= last
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    out = out.transpose(0, 2, 1, 3).reshape(B, L, -1)
    if gate is None:
        return out
    gate = gate[..., : 2 * Hq * D].reshape(B, L, Hq, 2, D)[..., 1, :].reshape(B, L, -1)
    return out * mx.sigmoid(gate)


def _decode_variant(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    gate: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple | None:
    dtype = q.dtype
    B, Hq, L, D = q.shape
    _, Hk, S, _ = k.shape
    fits = (
        dtype in _FLOATS
        and k.dtype == v.dtype == dtype
        and k.shape == v.shape == (B, Hk, S, D)
        and D % 32 == 0
        and 64 <= D <= 256
        and Hq % Hk == 0
        and 1 <= L <= min(MAX_TOKENS, S)
        and (
            gate is None
            or (gate.dtype == dtype and gate.ndim == 3 and gate.shape[:2] == (B, L)
                and gate.shape[2] >= 2 * Hq * D)
        )
        and (
            lengths is None
            or (lengths.dtype == mx.int32 and lengths.ndim == 1 and lengths.size in (1, B))
        )
    )  # fmt: skip
    return (dtype, D, Hk, Hq // Hk, L, gate is not None) if fits else None


def attn_decode_inputs(
    key: mx.array,
    dtype: mx.Dtype,
    D: int,
    Hk: int,
    G: int,
    L: int,
    gated: bool,
    B: int = 1,
    S: int = 75,
    ragged: bool = False,
) -> tuple:
    """Random arguments: k and v views of S positions of a longer buffer; lengths if `ragged`."""
    keys = mx.random.split(key, 5)
    q = mx.random.normal((B, Hk * G, L, D), key=keys[0]).astype(dtype)
    k, v = (mx.random.normal((B, Hk, S + 5, D), key=x).astype(dtype)[..., :S, :] for x in keys[1:3])
    gate = mx.random.normal((B, L, (2 * G + 2) * Hk * D), key=keys[3]).astype(dtype)
    lengths = mx.random.randint(L, S + 1, (B,), key=keys[4]) if ragged else None
    return q, k, v, D**-0.5, gate if gated else None, lengths


def _decode_bytes(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    gate: mx.array | None = None,
    lengths: mx.array | None = None,
) -> int:
    return (2 + (gate is not None)) * q.nbytes + k.nbytes + v.nbytes


@functools.lru_cache(maxsize=1024)
def _slices(S: int, groups: int) -> int:
    """How many slices S positions of `groups` key heads (by batch and block of rows) are cut into.

    As few as make enough threadgroups for the chip, since each slice costs a row of sums, but of
    at least `least` positions, which repay that, and at most `positions`, which fit.
    """
    tuning = tuned("attn_split")
    wanted = min(-(-tuning["threadgroups"] // groups), S // tuning["least"])
    return max(wanted, -(-S // tuning["positions"]), 1)


@op(
    reference=attn_decode_reference,
    variant=_decode_variant,
    inputs=attn_decode_inputs,
    bytes=_decode_bytes,
    kernels=("attn_split", "attn_merge"),
)
def attn_decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    gate: mx.array | None = None,
    lengths: mx.array | None = None,
) -> mx.array:
    """Causal attention of the last L tokens over a key-value cache, times sigmoid(gate).

    Args:
        q: (B, Hq, L, D), the last L positions, L at most 8; float32, float16 or bfloat16; D 64 to
            256 in steps of 32.
        k, v: (B, Hk, S, D), q.dtype, Hq a multiple of Hk. They and q may be views with any strides,
            which are not copied, but D values must lie side by side, aligned to 4.
        scale: of the scores.
        gate: (B, L, 2 * Hq * D or more), `attn_prep`'s proj: the second D of each query head's
            2 * D; None for no gate.
        lengths: (B,) or (1,) int32, how many positions of k and v count for each batch, L to S, the
            last L of them being q's; None for S. For k and v that are a cache's whole buffer.
    Returns: (B, L, Hq * D), q.dtype. fp32, rounded once. With other dtypes or shapes the reference
        serves; a mask other than causal is not this op's.
    Cost: 2 launches, 2 * B * Hk * S * D * itemsize bytes (times L * Hq / Hk / 8, rounded up).
    """
    B, Hq, L, D = q.shape
    Hk, S = k.shape[1:3]
    G = Hq // Hk
    tuning = tuned("attn_split")
    groups = Hk * -(-G * L // tuning["rows"])
    slices = _slices(S, B * groups)
    rows = B * Hq * L
    simdgroups = tuning["simdgroups"]
    sums, stats = kernel("attn_split")(
        inputs=[q, k, v, scalar(S, mx.int32) if lengths is None else lengths, scalar(scale)],
        template={
            "T": q.dtype,
            "D": D,
            "G": G,
            "L": L,
            "M": tuning["rows"],
            "SG": simdgroups,
            "N": tuning["positions"],
        },
        grid=(32 * simdgroups * slices, groups, B),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(rows, slices, D), (rows, 2, slices)],
        output_dtypes=[mx.float32, mx.float32],
    )
    merging = tuning["merging"]
    return kernel("attn_merge")(
        inputs=[sums, stats, q if gate is None else gate, scalar(slices, mx.int32)],
        template={
            "T": q.dtype,
            "D": D,
            "HK": Hk,
            "G": G,
            "L": L,
            "GATED": gate is not None,
            "SG": merging,
        },
        grid=(D, merging, rows),
        threadgroup=(32, merging, 1),
        output_shapes=[(B, L, Hq * D)],
        output_dtypes=[q.dtype],
    )[0]
