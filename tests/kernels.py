"""The shipped kernels, and the variants and sizes that each is compiled and proven at.

One row a kernel: `variants` are what `op.inputs` takes after the key, `sizes` its awkward sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextRMSNormGated
from mlx_lm.models.switch_layers import SwitchGLU

from lily_mlx.ops import attention, delta, linear, moe, norm, route
from lily_mlx.runtime import Op

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Row:
    """An op, the variants it ships in, sizes beyond the small default, and MLX-LM's own of it."""

    op: Op
    variants: list[tuple[Any, ...]]
    sizes: list[dict[str, Any]] = field(default_factory=list)
    stock: Callable[..., Any] | None = None


def _qwen3_next_norm(x: mx.array, gate: mx.array, weight: mx.array, eps: float) -> mx.array:
    module = Qwen3NextRMSNormGated(x.shape[-1], eps)
    module.weight = weight
    return module(x, gate)


def _moe_gate_up(x, w, scales, biases, shared_w, shared_scales, shared_biases, experts, gain, eps,
                 group_size, bits, mode):  # fmt: skip
    """Up to its down projections, which it is without: of all experts and the shared one."""
    D, E = x.shape[1], w.shape[0] // 2
    x = x if gain is None else mx.fast.rms_norm(x, gain, eps)
    routed = SwitchGLU(D, w.shape[1], E)
    shared = Qwen3NextMLP(D, shared_w.shape[0] // 2)
    for module, arrays in (
        (routed, (w, scales, biases)),
        (shared, (shared_w, shared_scales, shared_biases)),
    ):
        module.down_proj = lambda act, *_, **__: act
        for i, name in enumerate(("gate_proj", "up_proj")):
            quantized = module[name].to_quantized(group_size, bits, mode)
            for key, a in zip(("weight", "scales", "biases"), arrays, strict=True):
                quantized[key] = None if a is None else mx.split(a, 2)[i]
            module[name] = quantized
    return mx.concatenate([routed(x, experts), shared(x)[:, None]], axis=1)


def _gated_delta_net(proj, window, conv_weight, A_log, dt_bias, norm_weight, state, eps):
    """Between its in-projections and its out-projection, which it is without."""
    _, Hv, Dv, Dk = state.shape
    C, K, _ = conv_weight.shape
    layer = GatedDeltaNet(
        TextModelArgs(
            hidden_size=1,
            rms_norm_eps=eps,
            linear_num_value_heads=Hv,
            linear_num_key_heads=(C - Hv * Dv) // (2 * Dk),
            linear_key_head_dim=Dk,
            linear_value_head_dim=Dv,
            linear_conv_kernel_dim=K,
        )
    )
    parts = mx.split(proj, [C, C + Hv * Dv, C + Hv * (Dv + 1)], axis=-1)
    for name, part in zip(("qkv", "z", "b", "a"), parts, strict=True):
        layer[f"in_proj_{name}"] = lambda _, part=part: part
    layer.out_proj = lambda y: y
    layer.conv1d.weight, layer.A_log, layer.dt_bias = conv_weight, A_log, dt_bias
    layer.norm.weight = norm_weight
    cache = ArraysCache(2)
    cache[0], cache[1] = window, state
    return layer(proj, None, cache), cache[0], cache[1]


def _attention_prep(proj, q_norm, k_norm, offsets, heads, rotary, base, eps, gated):
    B, L, _ = proj.shape
    (Hq, Hk), D = heads, q_norm.shape[0]
    width = Hq * D * (1 + gated)
    q, k, v = mx.split(proj, [width, width + Hk * D], axis=-1)
    q = mx.split(q.reshape(B, L, Hq, -1), 1 + gated, axis=-1)[0]
    rope, out = nn.RoPE(rotary, traditional=False, base=base), []
    for x, weight in ((q, q_norm), (k.reshape(B, L, Hk, D), k_norm)):
        norm = nn.RMSNorm(D, eps)
        norm.weight = weight
        out.append(rope(norm(x).transpose(0, 2, 1, 3), offset=offsets))
    return *out, v.reshape(B, L, Hk, D).transpose(0, 2, 1, 3)


def _gated_attention(q, k, v, scale, gate, lengths):
    (B, H, L, D), S = q.shape, k.shape[2]
    mask = None if L == 1 else "causal"
    if lengths is not None:
        mask = mx.arange(S) < (lengths[:, None] - L + 1 + mx.arange(L))[:, None, :, None]
    out = scaled_dot_product_attention(q, k, v, cache=None, scale=scale, mask=mask)
    out = out.transpose(0, 2, 1, 3).reshape(B, L, -1)
    if gate is None:
        return out
    _, gate = mx.split(gate[..., : 2 * H * D].reshape(B, L, H, -1), 2, axis=-1)
    return out * mx.sigmoid(gate.reshape(B, L, -1))


def _norm_linear(x, w, scales, biases, weight, eps, residual, group_size, bits, mode):
    layer = nn.QuantizedLinear(x.shape[-1], w.shape[0], False, group_size, bits, mode=mode)
    layer.weight, layer.scales, layer.biases = w, scales, biases
    if weight is not None:
        norm = nn.RMSNorm(x.shape[-1], eps)
        norm.weight = weight
        x = norm(x)
    return layer(x) if residual is None else residual + layer(x)


# dtype, mode, bits, group size, K, R, norm, residual. All bits, groups, modes and rows; K with all
# lanes at work, or some of the last simdgroup's; the last is the target's, the two before it the
# embedded checkpoint's.
QMV = [
    (mx.bfloat16, "affine", 2, 32, 640, 1, True, True),
    (mx.float16, "affine", 3, 64, 1152, 2, False, True),
    (mx.float32, "affine", 5, 128, 256, 1, True, False),
    (mx.bfloat16, "affine", 6, 64, 640, 4, True, True),
    (mx.float16, "affine", 8, 128, 1152, 3, True, True),
    (mx.float32, "affine", 4, 32, 256, 8, False, True),
    (mx.bfloat16, "affine", 4, 128, 4096, 5, True, False),
    (mx.bfloat16, "mxfp4", 4, 32, 640, 1, True, True),
    (mx.float16, "nvfp4", 4, 16, 256, 2, False, False),
    (mx.float32, "mxfp8", 8, 32, 640, 6, True, True),
    (mx.float32, "affine", 4, 64, 256, 1, True, True),
    (mx.bfloat16, "affine", 8, 64, 256, 1, True, False),
    (mx.bfloat16, "affine", 4, 64, 2048, 1, True, True),
]

KERNELS = [
    Row(linear.qmv, variants=QMV, sizes=[{"N": 9}, {"N": 257}], stock=_norm_linear),
    Row(
        norm.rms_norm_gated,
        variants=list(product(FLOATS, (1, 33, 128, 257))),
        sizes=[{"lead": (1,)}, {"lead": (7,)}, {"lead": (2, 5, 8)}],
        stock=_qwen3_next_norm,
    ),
    Row(
        route.moe_route,
        variants=[
            (mx.float32, 17, 4, True),
            (mx.bfloat16, 256, 8, True),
            (mx.float16, 300, 5, False),
            (mx.float32, 1024, 31, True),
        ],
        sizes=[{"R": 65}],
    ),
    Row(
        moe.moe_gate_up,
        variants=[  # dtype, mode, bits, group size, D, F, K, norm
            (mx.bfloat16, "affine", 4, 64, 256, 64, 4, False),
            (mx.float32, "affine", 4, 32, 160, 16, 2, True),
            (mx.float16, "affine", 2, 32, 96, 48, 3, False),
            (mx.bfloat16, "affine", 3, 128, 1152, 16, 1, True),
            (mx.float32, "affine", 5, 64, 64, 32, 2, False),
            (mx.float16, "affine", 6, 128, 384, 16, 2, True),
            (mx.bfloat16, "affine", 8, 64, 576, 16, 8, True),
            (mx.bfloat16, "mxfp4", 4, 32, 96, 32, 2, False),
            (mx.float16, "nvfp4", 4, 16, 48, 16, 2, True),
            (mx.float32, "mxfp8", 8, 32, 160, 16, 2, False),
        ],
        sizes=[{"R": 8, "E": 5}],
        stock=_moe_gate_up,
    ),
    Row(
        moe.moe_down,
        variants=[  # dtype, mode, bits, group size, D, F, K
            (mx.bfloat16, "affine", 4, 64, 256, 64, 4),
            (mx.float32, "affine", 4, 32, 48, 96, 12),
            (mx.float16, "affine", 2, 32, 66, 32, 3),
            (mx.bfloat16, "affine", 3, 128, 32, 128, 1),
            (mx.float32, "affine", 5, 64, 64, 64, 2),
            (mx.float16, "affine", 6, 128, 80, 128, 2),
            (mx.bfloat16, "affine", 8, 64, 33, 192, 8),
            (mx.bfloat16, "mxfp4", 4, 32, 32, 96, 2),
            (mx.float16, "nvfp4", 4, 16, 48, 48, 2),
            (mx.float32, "mxfp8", 8, 32, 16, 160, 2),
        ],
        sizes=[{"R": 8, "E": 5}],
    ),
    Row(
        delta.gdn_step,
        variants=[  # dtype, A_log's, tokens, heads of k and v, their dimensions, convolution
            (mx.bfloat16, mx.float32, 1, 2, 4, 128, 128, 4),
            (mx.float32, mx.float32, 1, 1, 3, 32, 64, 3),
            (mx.float16, mx.float16, 3, 2, 2, 96, 32, 4),
            (mx.bfloat16, mx.bfloat16, 8, 1, 1, 64, 160, 2),
            (mx.float32, mx.float32, 2, 1, 2, 256, 256, 5),
        ],
        sizes=[{"B": 3}],
        stock=_gated_delta_net,
    ),
    Row(
        attention.attn_prep,
        variants=[  # dtype, dimension, heads of q and k, turned dimensions, gated
            (mx.bfloat16, 256, 16, 2, 64, True),
            (mx.float32, 256, 4, 2, 64, True),
            (mx.float16, 100, 3, 1, 22, False),
        ],
        sizes=[{"lead": (1, 1), "reach": 100}, {"lead": (2, 2)}],
        stock=_attention_prep,
    ),
    Row(
        attention.attn_decode,
        variants=[  # dtype, dimension, heads of k, of q to each, tokens, gated
            (mx.bfloat16, 256, 2, 8, 1, True),
            (mx.float32, 256, 2, 2, 1, True),
            (mx.float16, 64, 1, 5, 1, False),
            (mx.bfloat16, 96, 1, 3, 3, True),
            (mx.float32, 128, 2, 1, 8, False),
        ],
        sizes=[{"S": 8}, {"B": 2, "S": 300, "ragged": True}],
        stock=_gated_attention,
    ),
]


def cases() -> Iterator[tuple[Op, tuple[Any, ...], dict[str, Any]]]:
    """Each variant at its default size, then at each awkward one."""
    for row in KERNELS:
        for variant, size in product(row.variants, [{}, *row.sizes]):
            yield row.op, variant, size
