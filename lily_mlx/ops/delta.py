"""Gated delta nets: what stands between a layer's in-projections and its out-projection."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device import tuned
from ..runtime import kernel, op, scalar

_FLOATS = (mx.bfloat16, mx.float16, mx.float32)
_MAX_TOKENS = 8
_MAX_SHARED = 32 * 1024  # bytes of threadgroup memory
_QK_EPS = 1e-6  # of mlx_lm's layer and of the kernel

_Variant = tuple[mx.Dtype, mx.Dtype, int, int, int, int, int, int]


def gdn_step_reference(
    proj: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array, mx.array]:
    """`gdn_step` in plain MLX, operation by operation as MLX-LM has it."""
    B, T, _ = proj.shape
    _, Hv, Dv, Dk = state.shape
    keep, C = window.shape[1:]
    Hk = (C - Hv * Dv) // (2 * Dk)
    qkv, z, b, a = mx.split(proj, [C, C + Hv * Dv, C + Hv * (Dv + 1)], axis=-1)

    x = mx.concatenate([window, qkv], axis=1)
    new_window = mx.contiguous(x[:, -keep:])
    x = nn.silu(mx.conv1d(x, conv_weight, groups=C))
    q, k, v = mx.split(x, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    scale = Dk**-0.5
    q = scale**2 * mx.fast.rms_norm(q.reshape(B, T, Hk, Dk), None, _QK_EPS * scale**2)
    k = scale * mx.fast.rms_norm(k.reshape(B, T, Hk, Dk), None, _QK_EPS * scale**2)
    q, k = mx.repeat(q, Hv // Hk, axis=2), mx.repeat(k, Hv // Hk, axis=2)
    v = v.reshape(B, T, Hv, Dv)
    beta = mx.sigmoid(b)
    decay = mx.exp(-mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias))

    out = []
    for t in range(T):
        key, query = k[:, t, :, None], q[:, t, :, None]
        state = state * decay[:, t, :, None, None]
        delta = (v[:, t] - (state * key).sum(axis=-1)) * beta[:, t, :, None]
        state = state + key * delta[..., None]
        out.append((state * query).sum(axis=-1).astype(q.dtype))
    y = mx.stack(out, axis=1)
    normed = mx.fast.rms_norm(y, norm_weight, eps).astype(mx.float32)
    gate = nn.silu(z.reshape(y.shape).astype(mx.float32))
    return (gate * normed).astype(y.dtype).reshape(B, T, Hv * Dv), new_window, state


def _variant(
    proj: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    eps: float = 1e-6,
) -> _Variant | None:
    dtype, decay = proj.dtype, A_log.dtype
    if (
        not window.dtype == conv_weight.dtype == dt_bias.dtype == norm_weight.dtype == dtype
        or decay not in (dtype, mx.float32)
        or state.dtype != mx.float32
    ):
        return None
    shapes = (proj.shape, window.shape, conv_weight.shape, state.shape)
    return _of_shapes(dtype, decay, *shapes, A_log.shape, dt_bias.shape, norm_weight.shape)


@functools.lru_cache(maxsize=256)
def _of_shapes(
    dtype: mx.Dtype, decay: mx.Dtype, proj: tuple[int, ...], window: tuple[int, ...],
    conv: tuple[int, ...], state: tuple[int, ...], *heads: tuple[int, ...],
) -> _Variant | None:  # fmt: skip
    """The variant of these shapes; None if they do not fit each other or the kernel."""
    if (len(proj), len(window), len(conv), len(state)) != (3, 3, 3, 4) or dtype not in _FLOATS:
        return None
    B, T, _ = proj
    _, Hv, Dv, Dk = state
    C, K, _ = conv
    keys = C - Hv * Dv
    if 0 in (*proj, *state) or keys <= 0 or keys % (2 * Dk) or K < 2 or Dk % 32 or Dv % 32:
        return None
    Hk = keys // (2 * Dk)
    fits = (
        proj == (B, T, C + Hv * (Dv + 2))
        and window == (B, K - 1, C)
        and conv == (C, K, 1)
        and state[0] == B
        and heads == ((Hv,), (Hv,), (Dv,))
        and Hv % Hk == 0
        and T <= _MAX_TOKENS
        and max(Dk, Dv) <= 256
        and 4 * T * (2 * Dk + 3 * Dv + 2) <= _MAX_SHARED
    )
    return (dtype, decay, T, Hk, Hv, Dk, Dv, K) if fits else None


@functools.cache
def _geometry(Dk: int, Dv: int) -> tuple[int, int, int]:
    """Lanes of a row of the state, rows of a lane at a time, threads."""
    tuning = tuned("gdn_step")
    lanes, rows = 8, tuning["rows"]
    while Dk > 16 * lanes and Dk % (8 * lanes) == 0:
        lanes *= 2
    simdgroups = Dv // rows * lanes // 32
    fits = tuning["threads"] // 32
    return lanes, rows, 32 * max(n for n in range(1, fits + 1) if simdgroups % n == 0)


def gdn_step_inputs(
    key: mx.array, dtype: mx.Dtype, decay: mx.Dtype, T: int, Hk: int, Hv: int, Dk: int, Dv: int,
    K: int, B: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """Random arguments of a variant, of the sizes that a trained layer has; B sequences."""
    C = 2 * Hk * Dk + Hv * Dv
    keys = mx.random.split(key, 7)

    def normal(i: int, *shape: int, scale: float = 1.0) -> mx.array:
        return mx.random.normal(shape, scale=scale, key=keys[i])

    proj = normal(0, B, T, C + Hv * (Dv + 2)).astype(dtype)
    window = normal(1, B, K - 1, C).astype(dtype)
    conv = normal(2, C, K, 1, scale=K**-0.5).astype(dtype)
    A_log = mx.log(mx.random.uniform(0.01, 4, (Hv,), key=keys[3])).astype(decay)
    dt_bias = normal(4, Hv).astype(dtype)
    norm = (1 + normal(5, Dv, scale=0.1)).astype(dtype)
    return proj, window, conv, A_log, dt_bias, norm, normal(6, B, Hv, Dv, Dk, scale=0.2), 1e-6


def _bytes(
    proj: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    eps: float = 1e-6,
) -> int:
    B, T, _ = proj.shape
    weights = conv_weight.nbytes + A_log.nbytes + dt_bias.nbytes + norm_weight.nbytes
    y = B * T * state.shape[1] * state.shape[2] * proj.itemsize
    return proj.nbytes + weights + y + 2 * (window.nbytes + state.nbytes)


@op(reference=gdn_step_reference, variant=_variant, inputs=gdn_step_inputs, bytes=_bytes)
def gdn_step(
    proj: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array, mx.array]:
    """One step of a gated delta net for each of T tokens. Source: mlx_lm's qwen3_5.GatedDeltaNet.

    Causal convolution, silu, norms of q and k, gates, delta rule, gated norm. With Hk heads of q
    and k, Hv of v, and C = 2 * Hk * Dk + Hv * Dv channels of convolution:

    Args:
        proj: (B, T, C + Hv * Dv + 2 * Hv), float32, float16 or bfloat16: q, k, v, z, b, a, as the
            layer's in-projections give them, side by side. The kernel takes T up to 8.
        window: (B, K - 1, C), proj.dtype: q, k, v of the tokens before; zeros at the start.
        conv_weight: (C, K, 1), proj.dtype.
        A_log: (Hv,), float32 or proj.dtype.
        dt_bias: (Hv,), proj.dtype.
        norm_weight: (Dv,), proj.dtype.
        state: (B, Hv, Dv, Dk), float32; zeros at the start. Dk and Dv multiples of 32 up to 256.
        eps: of the gated norm.
    Returns: y (B, T, Hv * Dv), proj.dtype; the new window and the new state, as window and state
        (mlx_lm's cache[0] and cache[1]). fp32 throughout, y rounded once.
    Cost: 1 launch; 8 * B * Hv * Dv * Dk bytes of state, and every other array once.
    Raises: ValueError on gradients; MLX-LM's own layer has them.
    """
    B, T, _ = proj.shape
    _, Hv, Dv, Dk = state.shape
    C, K, _ = conv_weight.shape
    lanes, rows, threads = _geometry(Dk, Dv)
    y, new_window, new_state = kernel("gdn_step")(
        inputs=[proj, window, conv_weight, A_log, dt_bias, norm_weight, state, scalar(eps)],
        template={
            "T": proj.dtype,
            "S": A_log.dtype,
            "TOKENS": T,
            "HK": (C - Hv * Dv) // (2 * Dk),
            "HV": Hv,
            "DK": Dk,
            "DV": Dv,
            "CONV": K,
            "L": lanes,
            "R": rows,
            "THREADS": threads,
        },
        grid=(threads, Hv, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, T, Hv * Dv), window.shape, state.shape],
        output_dtypes=[proj.dtype, proj.dtype, mx.float32],
    )
    return y, new_window, new_state
