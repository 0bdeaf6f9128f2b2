"""Choosing experts: from the router's logits to their numbers and weights."""

from __future__ import annotations

import mlx.core as mx

from ..runtime import kernel, op

_MAX_EXPERTS = 1024  # to choose from: 32 a lane
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


def moe_route_reference(
    logits: mx.array, shared_gate: mx.array, top_k: int, normalize: bool = True
) -> tuple[mx.array, mx.array]:
    """`moe_route` in plain MLX, operation by operation as MLX-LM has it, but in sorted order.

    MLX's argpartition is this sort on a GPU; on the CPU it chooses the same, in another order.
    """
    probs = mx.softmax(logits, axis=-1, precise=True)
    experts = mx.argsort(probs, axis=-1)[..., -top_k:]
    scores = mx.take_along_axis(probs, experts, axis=-1)
    if normalize:
        scores = scores / scores.sum(axis=-1, keepdims=True)
    weights = mx.concatenate([scores, mx.sigmoid(shared_gate)], axis=-1)
    return experts, weights.astype(mx.float32)


def _route_variant(
    logits: mx.array, shared_gate: mx.array, top_k: int, normalize: bool = True
) -> tuple[mx.Dtype, int, int, bool] | None:
    E = logits.shape[-1]
    fits = (
        logits.ndim == 2
        and logits.size
        and logits.dtype in _FLOATS
        and shared_gate.dtype == logits.dtype
        and shared_gate.shape == (logits.shape[0], 1)
        and 0 < top_k <= min(E, 31)
        and E <= _MAX_EXPERTS
    )
    return (logits.dtype, E, top_k, normalize) if fits else None


def moe_route_inputs(
    key: mx.array, dtype: mx.Dtype, E: int, top_k: int, normalize: bool, R: int = 1
) -> tuple[mx.array, mx.array, int, bool]:
    """Random arguments: views of one (R, E + 1) array, as the router's pack gives them.

    Logits are multiples of 1/8: many are equal, and others differ in any exp and rounding.
    """
    gates = mx.random.normal((R, E + 1), scale=2.0, key=key)
    logits, shared_gate = mx.split((mx.round(8 * gates) / 8).astype(dtype), [E], axis=-1)
    return logits, shared_gate, top_k, normalize


def _route_bytes(
    logits: mx.array, shared_gate: mx.array, top_k: int, normalize: bool = True
) -> int:
    return logits.nbytes + shared_gate.nbytes + logits.shape[0] * 4 * (2 * top_k + 1)


@op(
    reference=moe_route_reference,
    variant=_route_variant,
    inputs=moe_route_inputs,
    bytes=_route_bytes,
)
def moe_route(
    logits: mx.array, shared_gate: mx.array, top_k: int, normalize: bool = True
) -> tuple[mx.array, mx.array]:
    """The top_k experts of each row by softmax(logits), and the weights of their outputs.

    Args:
        logits: (R, E), float32, float16 or bfloat16; E at most 1,024. May be strided.
        shared_gate: (R, 1), logits.dtype: logit of the shared expert's weight. May be strided.
        top_k: experts of a row, at most 31.
        normalize: whether their weights shall sum to 1 (mlx_lm's norm_topk_prob).
    Returns: experts (R, top_k) uint32, those that MLX-LM's block chooses, weakest first, of equal
        ones the smaller index first; weights (R, top_k + 1) float32, of these and, last, the
        shared expert: sigmoid(shared_gate). Not rounded to logits.dtype as MLX-LM's are.
    Cost: 1 launch, R * ((E + 1) * itemsize + 8 * top_k + 4) bytes.
    """
    R, E = logits.shape
    experts, weights = kernel("moe_route")(
        inputs=[logits, shared_gate],
        template={"T": logits.dtype, "E": E, "K": top_k, "NORMALIZE": normalize},
        grid=(32 * R, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(R, top_k), (R, top_k + 1)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    return experts, weights
