"""Qwen3.5, Qwen3.6 and Qwen3-Next, dense and mixture-of-experts."""

from mlx_lm.models import qwen3_5, qwen3_next, switch_layers

from ..layers.attention import FusedAttention
from ..layers.delta_net import FusedGatedDeltaNet
from ..layers.mlp import FusedMLP, FusedSparseMoeBlock, FusedSwitchGLU

PLAN: dict[type, type] = {
    qwen3_5.GatedDeltaNet: FusedGatedDeltaNet,
    qwen3_next.Qwen3NextAttention: FusedAttention,
    qwen3_next.Qwen3NextMLP: FusedMLP,
    qwen3_next.Qwen3NextSparseMoeBlock: FusedSparseMoeBlock,
    switch_layers.SwitchGLU: FusedSwitchGLU,
}
