"""Norms fused with what follows them."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from ..device import tuned
from ..runtime import kernel, op, scalar


def rms_norm_gated_reference(
    x: mx.array, gate: mx.array, weight: mx.array, eps: float = 1e-6
) -> mx.array:
    """`rms_norm_gated` in plain MLX, operation by operation as MLX-LM has it."""
    normed = mx.fast.rms_norm(x, weight, eps).astype(mx.float32)
    return (nn.silu(gate.astype(mx.float32)) * normed).astype(x.dtype)


def _variant(
    x: mx.array, gate: mx.array, weight: mx.array, eps: float = 1e-6
) -> tuple[mx.Dtype, int] | None:
    dtype = x.dtype
    return (dtype, x.shape[-1]) if gate.dtype == weight.dtype == dtype and x.size else None


def rms_norm_gated_inputs(
    key: mx.array, dtype: mx.Dtype, D: int, lead: tuple[int, ...] = (2, 3)
) -> tuple[mx.array, mx.array, mx.array, float]:
    """Random arguments: x and gate (*lead, D), weight (D,) near 1."""
    keys = mx.random.split(key, 3)
    x, gate = (mx.random.normal((*lead, D), key=k).astype(dtype) for k in keys[:2])
    weight = (1 + 0.1 * mx.random.normal((D,), key=keys[2])).astype(dtype)
    return x, gate, weight, 1e-6


def _bytes(x: mx.array, gate: mx.array, weight: mx.array, eps: float = 1e-6) -> int:
    return 2 * x.nbytes + gate.nbytes + weight.nbytes


@op(
    reference=rms_norm_gated_reference,
    variant=_variant,
    inputs=rms_norm_gated_inputs,
    bytes=_bytes,
)
def rms_norm_gated(x: mx.array, gate: mx.array, weight: mx.array, eps: float = 1e-6) -> mx.array:
    """silu(gate) * weight * x / sqrt(mean(x^2) + eps). Source: mlx_lm's Qwen3NextRMSNormGated.

    Args:
        x: (..., D), float32, float16 or bfloat16.
        gate: as x.
        weight: (D,), x.dtype; with another, as with an empty x, the reference serves.
        eps: added to the mean square.
    Returns: as x. fp32 sums; rounds where MLX-LM does.
    Cost: 1 launch, (3 * rows * D + D) * itemsize bytes.
    Raises: ValueError on gradients; MLX-LM's own layer has them.
    """
    D = x.shape[-1]
    rows = x.size // D
    group = math.gcd(rows, tuned("rms_norm_gated")["rows"])
    return kernel("rms_norm_gated")(
        inputs=[x, gate, weight, scalar(eps)],
        template={"T": x.dtype, "D": D},
        grid=(32, rows, 1),
        threadgroup=(32, group, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]
