"""MLX's affine group quantization, in torch, for quantization-aware training."""

import torch
from torch import Tensor, nn

GROUP = 64


def fake_quantize(w: Tensor, bits: int) -> Tensor:
    """``w`` [..., K] rounded to what ``mx.dequantize(*mx.quantize(w))`` gives, K a multiple of 64.

    MLX's rule: the scale spans the group's range over 2^bits - 1 steps and is then adjusted so
    that the end of larger magnitude is exact; the bias is that end, or 0. Weights, scales and
    biases are held in bf16 as the shipped checkpoint holds them.
    """
    steps = 2**bits - 1
    groups = w.to(torch.bfloat16).float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / steps).clamp_min(1e-7)
    low_is_larger = low.abs() > high.abs()
    scale = torch.where(low_is_larger, scale, -scale)
    edge = torch.where(low_is_larger, low, high)
    steps_to_edge = torch.round(edge / scale)
    at_zero = steps_to_edge == 0
    scale = torch.where(at_zero, scale, edge / torch.where(at_zero, 1.0, steps_to_edge))
    bias = torch.where(at_zero, 0.0, edge)
    q = torch.round((groups - bias) / scale).clamp(0, steps)
    scale, bias = scale.to(torch.bfloat16).float(), bias.to(torch.bfloat16).float()
    return (q * scale + bias).to(torch.bfloat16).float().flatten(-2).to(w.dtype)


def bits_of(name: str) -> int | None:
    """Bits of a parameter in the shipped checkpoint; None where it stays in bf16 or fp32.

    ``name`` is transformers'. The router and the shared expert's gate take 8 bits, as mlx_lm's
    own predicate for this family has it.
    """
    if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        return 8
    last = name.rsplit(".", 2)[-2:]
    if "norm" in name or "conv1d" in name or last[-1] in ("A_log", "dt_bias"):
        return None
    return 4


class Quantized:
    """Swaps quantized weights into modules and the master weights back (straight-through)."""

    def __init__(self, *modules: nn.Module):
        named = [item for module in modules for item in module.named_parameters()]
        self.params = [(p, bits_of(name)) for name, p in named if bits_of(name)]
        self.masters = [torch.empty_like(p) for p, _ in self.params]

    @torch.no_grad()
    def __enter__(self):
        for (p, bits), master in zip(self.params, self.masters, strict=True):
            master.copy_(p)
            p.copy_(fake_quantize(p, bits))

    @torch.no_grad()
    def __exit__(self, *exc):
        for (p, _), master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
