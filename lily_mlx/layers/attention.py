"""Gated attention of qwen3_next and qwen3_5 models, decode."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_next
from mlx_lm.models.base import scaled_dot_product_attention

from .base import Fused, few_tokens


class FusedAttention(Fused, qwen3_next.Qwen3NextAttention):
    """q_proj (queries and gate), k_proj and v_proj as one matmul; the rest is mlx_lm's."""

    PACKS = {"qkv": ("q_proj", "k_proj", "v_proj")}  # noqa: RUF012

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        """Args: x (B, L, D); mask and cache as mlx_lm passes them."""
        if not few_tokens(x) or (packs := self.packs()) is None:
            return super().__call__(x, mask, cache)
        B, L, _ = x.shape
        q, k, v = packs["qkv"](x)
        q, gate = mx.split(q.reshape(B, L, self.num_attention_heads, -1), 2, axis=-1)
        q = self.q_norm(q).transpose(0, 2, 1, 3)
        k = self.k_norm(k.reshape(B, L, self.num_key_value_heads, -1)).transpose(0, 2, 1, 3)
        v = v.reshape(B, L, self.num_key_value_heads, -1).transpose(0, 2, 1, 3)
        offset = cache.offset if cache is not None else 0
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        out = out.transpose(0, 2, 1, 3).reshape(B, L, -1)
        return self.o_proj(out * mx.sigmoid(gate.reshape(B, L, -1)))
