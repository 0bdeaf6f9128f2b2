"""What every fused layer is: a subclass of mlx_lm's that packs, checks and lets go."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from .packed import Packed, Packs, why_not

# Up to this many tokens in a call a layer takes its decode path; prefill is mlx_lm's.
FEW_TOKENS = 8


class Fused:
    """Mixed in before the mlx_lm class a fused layer replaces: `class X(Fused, Stock)`.

    A fused layer is made by setting `module.__class__`, so it adds no constructor, parameters or
    children. What it keeps is in `_packs`, which the parameter tree does not show.

    Class attributes:
        PACKS: {name of the pack: names of the children packed}.
    """

    PACKS: ClassVar[dict[str, tuple[str, ...]]]
    _packs: Packs | None = None

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        """Why `module`, of the stock class, cannot become this class; None when it can."""
        for names in cls.PACKS.values():
            if reason := why_not([module[name] for name in names]):
                return reason
        return None

    @classmethod
    def pack(cls, module: nn.Module) -> None:
        """Build the packs of `module`; its children's arrays become views of them."""
        packs = Packs({key: Packed(module, names) for key, names in cls.PACKS.items()})
        object.__setattr__(module, "_packs", packs)  # a Module's own setattr makes it a child

    def packs(self) -> Packs | None:
        """The packs if the fused path may run now, else None.

        None when a packed child or array has been replaced since, and in training: gradients are
        taken through mlx_lm's own layers.
        """
        packs = self._packs
        if packs is None or self.training or not packs.intact():
            return None
        return packs

    def probe(self, key: mx.array) -> tuple[mx.array, ...]:
        """Random arguments of a call that takes the fused path: by default x (1, 1, D)."""
        pack = next(iter(self._packs.values()))
        dtype = mx.float32 if pack.scales is None else pack.scales.dtype
        if not mx.issubdtype(dtype, mx.floating):  # scales of mxfp4, mxfp8 and nvfp4 are bytes
            dtype = mx.bfloat16
        return (mx.random.normal((1, 1, pack.input_dims), key=key).astype(dtype),)


def few_tokens(x: mx.array) -> bool:
    """Whether x (B, L, D) is decode: a token, a small batch, or a few to verify."""
    return x.shape[0] * x.shape[1] <= FEW_TOKENS
