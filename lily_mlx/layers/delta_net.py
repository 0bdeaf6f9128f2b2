"""Gated delta net of qwen3_5 models, decode."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from .base import Fused, few_tokens


class FusedGatedDeltaNet(Fused, qwen3_5.GatedDeltaNet):
    """in_proj_qkv, in_proj_z, in_proj_b and in_proj_a as one matmul; the rest is mlx_lm's."""

    PACKS = {"in": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}  # noqa: RUF012

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        """Args: inputs (B, L, D); mask (B, L) or None; cache: mlx_lm's ArraysCache(2) or None."""
        if (
            not few_tokens(inputs)
            or mask is not None
            or self.sharding_group is not None
            or (cache is not None and cache.lengths is not None)
            or (packs := self.packs()) is None
        ):
            return super().__call__(inputs, mask, cache)
        B, L, _ = inputs.shape
        qkv, z, b, a = packs["in"](inputs)

        n_keep = self.conv_kernel_size - 1
        window = cache[0] if cache is not None else None
        if window is None:
            window = mx.zeros((B, n_keep, self.conv_dim), dtype=inputs.dtype)
        window = mx.concatenate([window, qkv], axis=1)
        if cache is not None:
            cache[0] = mx.contiguous(window[:, -n_keep:, :])
        q, k, v = mx.split(nn.silu(self.conv1d(window)), [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = normalize_qk(
            q.reshape(B, L, self.num_k_heads, self.head_k_dim),
            k.reshape(B, L, self.num_k_heads, self.head_k_dim),
            inv_scale=self.head_k_dim**-0.5,
            eps=1e-6,
        )
        out, state = gated_delta_update(
            q,
            k,
            v.reshape(B, L, self.num_v_heads, self.head_v_dim),
            a,
            b,
            self.A_log,
            self.dt_bias,
            cache[1] if cache is not None else None,
        )
        if cache is not None:
            cache[1] = state
            cache.advance(L)
        out = self.norm(out, z.reshape(B, L, self.num_v_heads, self.head_v_dim))
        return self.out_proj(out.reshape(B, L, -1))
