"""Dense and mixture-of-experts feed-forward blocks, decode."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import qwen3_next, switch_layers
from mlx_lm.models.activations import swiglu

from .base import Fused, few_tokens

# From here up mlx_lm sorts tokens by expert (SwitchGLU), which pays off; below, we gather.
SORTED_PAIRS = 64


class FusedMLP(Fused, qwen3_next.Qwen3NextMLP):
    """gate_proj and up_proj as one matmul: down(silu(gate(x)) * up(x))."""

    PACKS = {"gate_up": ("gate_proj", "up_proj")}  # noqa: RUF012

    def __call__(self, x: mx.array) -> mx.array:
        """Args: x (B, L, D). Returns: (B, L, D)."""
        if x.ndim != 3 or not few_tokens(x) or (packs := self.packs()) is None:
            return super().__call__(x)
        return self.down_proj(swiglu(*packs["gate_up"](x)))


class FusedSwitchGLU(Fused, switch_layers.SwitchGLU):
    """gate_proj and up_proj of the chosen experts as one gathered matmul."""

    PACKS = {"gate_up": ("gate_proj", "up_proj")}  # noqa: RUF012

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Args: x (..., D); indices (..., K) of experts. Returns: (..., K, D)."""
        if indices.size >= SORTED_PAIRS or (packs := self.packs()) is None:
            return super().__call__(x, indices)
        gate, up = packs["gate_up"].gather(mx.expand_dims(x, (-2, -3)), indices)
        return self.down_proj(self.activation(up, gate), indices).squeeze(-2)

    def probe(self, key: mx.array) -> tuple[mx.array, ...]:
        """x (1, 1, D) and indices (1, 1, 2): the first and the last expert."""
        (x,) = super().probe(key)
        return x, mx.array([[[0, self.down_proj["weight"].shape[0] - 1]]])


class FusedSparseMoeBlock(Fused, qwen3_next.Qwen3NextSparseMoeBlock):
    """Router and shared-expert gate as one matmul.

    The experts and the shared expert are children with fused classes of their own.
    """

    PACKS = {"gates": ("gate", "shared_expert_gate")}  # noqa: RUF012

    def __call__(self, x: mx.array) -> mx.array:
        """Args: x (B, L, D). Returns: (B, L, D)."""
        if (
            x.ndim != 3
            or not few_tokens(x)
            or self.sharding_group is not None
            or (packs := self.packs()) is None
        ):
            return super().__call__(x)
        logits, shared_gate = packs["gates"](x)
        probs = mx.softmax(logits, axis=-1, precise=True)
        k = self.top_k
        experts = mx.stop_gradient(mx.argpartition(probs, kth=-k, axis=-1)[..., -k:])
        scores = mx.take_along_axis(probs, experts, axis=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        y = (self.switch_mlp(x, experts) * scores[..., None]).sum(axis=-2)
        return y + mx.sigmoid(shared_gate) * self.shared_expert(x)
