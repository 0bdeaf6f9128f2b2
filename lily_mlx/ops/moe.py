"""Mixture of experts at decode, once they are chosen: gate and up with SwiGLU, down and combine.

The shared expert, quantized and shaped like the routed ones, is one more of them: the last.
"""

from __future__ import annotations

import functools
import math

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from ..device import tuned
from ..runtime import kernel, op, scalar
from .linear import _values as values_of_a_lane

MAX_ROWS = 8
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


def moe_gate_up_reference(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    shared_w: mx.array,
    shared_scales: mx.array,
    shared_biases: mx.array | None,
    experts: mx.array,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """`moe_gate_up` in plain MLX, operation by operation as MLX-LM has it."""
    if norm_weight is not None:
        x = mx.fast.rms_norm(x, norm_weight, eps)
    quantization = {"transpose": True, "group_size": group_size, "bits": bits, "mode": mode}
    halves = ([None] * 2 if a is None else mx.split(a, 2) for a in (w, scales, biases))
    gate, up = (
        mx.gather_qmm(mx.expand_dims(x, (-2, -3)), *half, rhs_indices=experts, **quantization)
        for half in zip(*halves, strict=True)
    )
    shared = mx.quantized_matmul(x, shared_w, shared_scales, shared_biases, **quantization)
    routed = swiglu(gate, up).squeeze(-2)
    return mx.concatenate([routed, swiglu(*mx.split(shared, 2, axis=-1))[:, None]], axis=1)


def _serves(
    x: mx.array,
    weights: tuple[mx.array, mx.array, mx.array | None],
    shared: tuple[mx.array, mx.array, mx.array | None],
    experts: mx.array,
    affine: bool,
) -> bool:
    """Whether dtypes and shapes of an expert matmul are those that the kernels are made for."""
    scales = x.dtype if affine else mx.uint8
    return (
        x.dtype in _FLOATS
        and 0 < x.shape[0] <= MAX_ROWS
        and experts.ndim == 2
        and experts.shape[0] == x.shape[0]
        and 0 < experts.shape[1] < 32
        and experts.dtype == mx.uint32
        and weights[0].ndim == 3
        and all((a is None) == (b is None) for a, b in zip(weights, shared, strict=True))
        and (weights[2] is not None) == affine
        and scales == weights[1].dtype == shared[1].dtype
        # Of one expert: a routed one's shape is the shared one's, in codes and in groups.
        and shared[0].shape[1] == weights[0].shape[2]
        and shared[1].shape[1] == weights[1].shape[2]
    )


def _gate_up_variant(
    x, w, scales, biases, shared_w, shared_scales, shared_biases, experts,
    norm_weight=None, eps=1e-6, group_size=64, bits=4, mode="affine",
):  # fmt: skip
    weights, shared = (w, scales, biases), (shared_w, shared_scales, shared_biases)
    if x.ndim != 2 or not _serves(x, weights, shared, experts, mode == "affine"):
        return None
    D, F = x.shape[1], w.shape[1]
    fits = (
        values_of_a_lane(mode, bits, group_size, D, 1)
        and w.shape[2] * 32 == D * bits
        and scales.shape[2] * group_size == D
        and w.shape[0] % 2 == 0
        and shared_w.shape[0] == 2 * F
        and (norm_weight is None or (norm_weight.dtype, norm_weight.size) == (x.dtype, D))
    )
    if not fits:
        return None
    return x.dtype, mode, bits, group_size, D, F, experts.shape[1], norm_weight is not None


def _experts(
    key: mx.array, shape: tuple[int, ...], dtype: mx.Dtype, mode: str, bits: int, group_size: int
) -> list[mx.array | None]:
    """Random quantized weights of a shape whose last part is what a product sums over."""
    w = (mx.random.normal(shape, key=key) * shape[-1] ** -0.5).astype(dtype)
    w, scales, *biases = mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    return [w, scales, biases[0] if biases else None]


def moe_gate_up_inputs(
    key: mx.array,
    dtype: mx.Dtype,
    mode: str,
    bits: int,
    group_size: int,
    D: int,
    F: int,
    K: int,
    norm: bool,
    R: int = 1,
    E: int = 3,
) -> tuple:
    """Random arguments: x (R, D), w (2 E, F, D) and shared (2 F, D) quantized, K experts a row."""
    keys = mx.random.split(key, 5)
    x = mx.random.normal((R, D), key=keys[0]).astype(dtype)
    w = _experts(keys[1], (2 * E, F, D), dtype, mode, bits, group_size)
    shared = _experts(keys[2], (2 * F, D), dtype, mode, bits, group_size)
    experts = mx.random.randint(0, E, (R, K), key=keys[3]).astype(mx.uint32)
    gain = (1 + 0.1 * mx.random.normal((D,), key=keys[4])).astype(dtype) if norm else None
    return x, *w, *shared, experts, gain, 1e-6, group_size, bits, mode


def _weight_bytes(experts: mx.array, count: int, routed: tuple, shared: tuple) -> int:
    """Bytes of the chosen experts, were no two rows to share one, and of the shared expert."""
    each = sum(a.nbytes for a in routed if a is not None) // count
    return min(experts.size, count) * each + sum(a.nbytes for a in shared if a is not None)


def _gate_up_bytes(
    x, w, scales, biases, shared_w, shared_scales, shared_biases, experts,
    norm_weight=None, eps=1e-6, group_size=64, bits=4, mode="affine",
):  # fmt: skip
    shared = (shared_w, shared_scales, shared_biases)
    act = x.shape[0] * (experts.shape[1] + 1) * w.shape[1] * x.itemsize
    weights = _weight_bytes(experts, w.shape[0] // 2, (w, scales, biases), shared)
    gain = 0 if norm_weight is None else norm_weight.nbytes
    return weights + x.nbytes + experts.nbytes + gain + act


@functools.cache
def _rows(name: str, outputs: int) -> int:
    """Outputs of a threadgroup: as tuned, or the part of it that divides them."""
    return math.gcd(outputs, tuned(name)["rows"])


@op(
    reference=moe_gate_up_reference,
    variant=_gate_up_variant,
    inputs=moe_gate_up_inputs,
    bytes=_gate_up_bytes,
)
def moe_gate_up(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    shared_w: mx.array,
    shared_scales: mx.array,
    shared_biases: mx.array | None,
    experts: mx.array,
    norm_weight: mx.array | None = None,
    eps: float = 1e-6,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """silu(n @ gate.T) * (n @ up.T) of each row's experts and the shared one, n = rms_norm(x) or x.

    Args:
        x: (R, D), 1 to 8 rows, float32, float16 or bfloat16, aligned to 16 bytes.
        w: (2 * E, F, D * bits / 32) uint32, scales and biases (2 * E, F, D / group_size): E gates,
            then E ups, as `mx.quantize` packs them; modes and bits as `qmv` takes them.
        shared_w, shared_scales, shared_biases: (2 * F, ...), gate rows, then up rows, quantized
            like w.
        experts: (R, K) uint32, below E; K at most 31.
        norm_weight: (D,), x.dtype; None for no norm.
        eps: added to the mean square.
        group_size, bits, mode: of w and shared_w.
    Returns: (R, K + 1, F), x.dtype, the shared expert last. fp32 sums; gate, up, silu and product
        round as MLX-LM's. Other dtypes and counts are the reference's.
    Raises: ValueError, from MLX, if the shared expert's F or quantization is not the routed ones';
        ask `moe_gate_up.usable(...)` first.
    Cost: 1 launch; bytes of the chosen experts and the shared one, and R * (D + (K + 1) * F) *
        itemsize. Experts that rows have in common are read once a row, from the cache.
    """
    (R, D), K, F = x.shape, experts.shape[1], w.shape[1]
    V = values_of_a_lane(mode, bits, group_size, D, 1)
    U = _rows("moe_gate_up", F)
    threads = -(-D // (32 * V)) * 32
    affine = mode == "affine"
    return kernel("moe_gate_up")(
        inputs=[
            x,
            w,
            scales,
            biases if affine else scales,
            shared_w,
            shared_scales,
            shared_biases if affine else shared_scales,
            experts,
            x if norm_weight is None else norm_weight,
            scalar(eps),
            scalar(w.shape[0] // 2, mx.int32),
        ],
        template={
            "T": x.dtype,
            "S": scales.dtype,
            "BITS": bits,
            "GROUP": group_size,
            "FP": not affine,
            "D": D,
            "F": F,
            "K": K,
            "V": V,
            "U": U,
            "NORM": norm_weight is not None,
        },
        grid=(R * threads, F // U, K + 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(R, K + 1, F)],
        output_dtypes=[x.dtype],
    )[0]


def moe_down_reference(
    act: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    shared_w: mx.array,
    shared_scales: mx.array,
    shared_biases: mx.array | None,
    experts: mx.array,
    weights: mx.array,
    residual: mx.array,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """`moe_down` in plain MLX, operation by operation as MLX-LM has it."""
    quantization = {"transpose": True, "group_size": group_size, "bits": bits, "mode": mode}
    K = experts.shape[1]
    weights = weights.astype(act.dtype)
    y = mx.gather_qmm(
        act[:, :K, None], w, scales, biases, rhs_indices=experts, **quantization
    ).squeeze(-2)
    y = (y * weights[:, :K, None]).sum(axis=-2)
    shared = mx.quantized_matmul(act[:, K], shared_w, shared_scales, shared_biases, **quantization)
    return residual + (y + weights[:, K:] * shared)


def _down_variant(
    act, w, scales, biases, shared_w, shared_scales, shared_biases, experts,
    weights, residual, group_size=64, bits=4, mode="affine",
):  # fmt: skip
    routed, shared = (w, scales, biases), (shared_w, shared_scales, shared_biases)
    if act.ndim != 3 or not _serves(act, routed, shared, experts, mode == "affine"):
        return None
    (R, slots, F), K, D = act.shape, experts.shape[1], w.shape[1]
    fits = (
        slots == K + 1
        and F % group_size == 0
        and values_of_a_lane(mode, bits, group_size, slots * F, 1)
        and w.shape[2] * 32 == F * bits
        and scales.shape[2] * group_size == F
        and shared_w.shape[0] == D
        and (weights.dtype, weights.shape) == (mx.float32, (R, slots))
        and (residual.dtype, residual.shape) == (act.dtype, (R, D))
    )
    return (act.dtype, mode, bits, group_size, D, F, K) if fits else None


def moe_down_inputs(
    key: mx.array,
    dtype: mx.Dtype,
    mode: str,
    bits: int,
    group_size: int,
    D: int,
    F: int,
    K: int,
    R: int = 1,
    E: int = 3,
) -> tuple:
    """Random arguments: act (R, K + 1, F), w (E, D, F) and shared (D, F) quantized, and the rest.

    The weights are of dtype, so that MLX-LM, which rounds them, and the kernel start alike.
    """
    keys = mx.random.split(key, 6)
    act = mx.random.normal((R, K + 1, F), key=keys[0]).astype(dtype)
    w = _experts(keys[1], (E, D, F), dtype, mode, bits, group_size)
    shared = _experts(keys[2], (D, F), dtype, mode, bits, group_size)
    experts = mx.random.randint(0, E, (R, K), key=keys[3]).astype(mx.uint32)
    weights = mx.random.uniform(shape=(R, K + 1), key=keys[4]).astype(dtype).astype(mx.float32)
    residual = mx.random.normal((R, D), key=keys[5]).astype(dtype)
    return act, *w, *shared, experts, weights, residual, group_size, bits, mode


def _down_bytes(
    act, w, scales, biases, shared_w, shared_scales, shared_biases, experts,
    weights, residual, group_size=64, bits=4, mode="affine",
):  # fmt: skip
    shared = (shared_w, shared_scales, shared_biases)
    matrices = _weight_bytes(experts, w.shape[0], (w, scales, biases), shared)
    return matrices + act.nbytes + experts.nbytes + weights.nbytes + 2 * residual.nbytes


@op(
    reference=moe_down_reference,
    variant=_down_variant,
    inputs=moe_down_inputs,
    bytes=_down_bytes,
)
def moe_down(
    act: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    shared_w: mx.array,
    shared_scales: mx.array,
    shared_biases: mx.array | None,
    experts: mx.array,
    weights: mx.array,
    residual: mx.array,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """residual + sum over each row's experts and the shared one of weight * (act @ down.T).

    Args:
        act: (R, K + 1, F), the shared expert last, as `moe_gate_up` makes it; 1 to 8 rows.
        w: (E, D, F * bits / 32) uint32, scales and biases (E, D, F / group_size): E downs, as
            `mx.quantize` packs them; modes and bits as `qmv` takes them.
        shared_w, shared_scales, shared_biases: (D, ...), quantized like w.
        experts: (R, K) uint32, below E; K at most 31.
        weights: (R, K + 1) float32, of each expert's output, the shared one's last.
        residual: (R, D), act.dtype.
        group_size, bits, mode: of w and shared_w.
    Returns: (R, D), act.dtype. fp32 throughout, rounded once. Other dtypes and counts are the
        reference's.
    Raises: ValueError, from MLX, if the shared expert's quantization is not the routed ones'; ask
        `moe_down.usable(...)` first.
    Cost: 1 launch; bytes of the chosen experts and the shared one, and R * ((K + 1) * F + 2 * D) *
        itemsize. Experts that rows have in common are read once a row, from the cache.
    """
    (R, slots, F), D = act.shape, w.shape[1]
    V = values_of_a_lane(mode, bits, group_size, slots * F, 1)
    U = _rows("moe_down", D)
    threads = -(-slots * F // (32 * V)) * 32
    affine = mode == "affine"
    return kernel("moe_down")(
        inputs=[
            act,
            w,
            scales,
            biases if affine else scales,
            shared_w,
            shared_scales,
            shared_biases if affine else shared_scales,
            experts,
            weights,
            residual,
        ],
        template={
            "T": act.dtype,
            "S": scales.dtype,
            "BITS": bits,
            "GROUP": group_size,
            "FP": not affine,
            "D": D,
            "F": F,
            "K": slots - 1,
            "V": V,
            "U": U,
        },
        grid=(R * threads, D // U, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(R, D)],
        output_dtypes=[act.dtype],
    )[0]
