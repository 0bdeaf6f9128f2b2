"""Tiny models of random weights, for what the embedded checkpoint does not cover."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3, qwen3_5_moe

TEXT = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 128,
    "moe_intermediate_size": 128,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
}


def qwen3_5_moe_model(
    *,
    dtype: mx.Dtype = mx.float32,
    quantization: dict | None = None,
    mixed: dict[str, dict] | None = None,
    seed: int = 0,
    **text: object,
) -> nn.Module:
    """A qwen3_5_moe model of random weights, evaluated, in eval mode.

    Args:
        dtype: of the unquantized parameters.
        quantization: group_size, bits and mode of nn.quantize; None leaves it dense.
        mixed: {end of a module's path: another quantization}, as per-layer recipes have.
        text: changes to the text configuration.
    """
    mx.random.seed(seed)
    args = qwen3_5_moe.ModelArgs.from_dict(
        {"model_type": "qwen3_5_moe", "text_config": TEXT | text}
    )
    model = qwen3_5_moe.Model(args)
    model.set_dtype(dtype)
    if quantization is not None:
        stock = model.quant_predicate if quantization.get("mode", "affine") == "affine" else None

        def predicate(path: str, module: nn.Module) -> bool | dict:
            for end, other in (mixed or {}).items():
                if path.endswith(end):
                    return other
            if not hasattr(module, "to_quantized"):
                return False
            return stock(path, module) if stock else True

        nn.quantize(model, **quantization, class_predicate=predicate)
    model.eval()
    mx.eval(model.parameters())
    return model


def qwen3_model() -> nn.Module:
    """A dense model of an architecture that has no plan."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=64,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=1e4,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = qwen3.Model(args)
    model.eval()
    return model
