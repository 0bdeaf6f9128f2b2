"""Linear layers that read the same input, packed so that one matmul computes them all."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# What a linear layer is made of, in the order it is checked. Output rows are axis 0 of each; for
# experts axis 0 is the expert, so packing gate and up gives twice the experts, not wider ones.
ARRAYS = ("weight", "scales", "biases", "bias")
DENSE = (nn.Linear, SwitchLinear)
QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear)


def why_not(layers: list[nn.Module]) -> str | None:
    """Why `layers` cannot be packed, or None when they can.

    Exact types only: a subclass or an adapter (LoRA, DoRA) computes something else.
    """
    first = layers[0]
    for layer in layers:
        if type(layer) not in DENSE + QUANTIZED:
            return f"{type(layer).__name__} layers are not packed"
        if type(layer) is not type(first):
            return f"{type(first).__name__} and {type(layer).__name__} mixed"
        if layer.get("global_scale") is not None:
            return "a global scale per tensor is not packed"
        for name in ARRAYS:
            mine, other = layer.get(name), first.get(name)
            if (mine is None) != (other is None):
                return f"only some layers have {name}"
            if mine is not None and (mine.dtype, mine.shape[1:]) != (other.dtype, other.shape[1:]):
                return f"{name} differs in dtype or shape"
        if isinstance(layer, QUANTIZED) and _quantization(layer) != _quantization(first):
            return "mixed quantization"
    return None


def _quantization(layer: nn.Module) -> dict[str, Any]:
    return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


class Packed:
    """The children `names` of `parent` as one layer.

    Building it concatenates the children's arrays along axis 0 and makes each child's arrays views
    of the result: the parameter tree keeps its names, shapes and values, and no weight is held
    twice. While it builds, one layer's weights are.

    Args:
        parent: module that owns the children.
        names: attribute names of the children, in output order; `why_not` has returned None.
    """

    def __init__(self, parent: nn.Module, names: tuple[str, ...]):
        children = [parent[name] for name in names]
        first = children[0]
        self.rows = [child["weight"].shape[0] for child in children]
        self.splits = [sum(self.rows[: i + 1]) for i in range(len(self.rows) - 1)]
        self.quantization = _quantization(first) if isinstance(first, QUANTIZED) else None
        self.input_dims = (
            first["scales"].shape[-1] * first.group_size
            if self.quantization
            else first["weight"].shape[-1]
        )
        # (owner, key, value): what must still be in place for the packed arrays to be the truth.
        self._sources = [(parent, n, c) for n, c in zip(names, children, strict=True)]
        for name in ARRAYS:
            parts = [child.get(name) for child in children]
            array = None if parts[0] is None else mx.concatenate(parts, axis=0)
            setattr(self, name, array)
            if array is None:
                continue
            views = mx.split(array, self.splits, axis=0)
            mx.eval(array, views)
            for child, view in zip(children, views, strict=True):
                child[name] = view
                self._sources.append((child, name, view))

    def intact(self) -> bool:
        """Whether every child and array is still the one that was packed.

        An adapter loaded later, new weights or a cast replaces them; the caller then takes
        mlx_lm's path. Writing into an array in place (`w[0] = 1`) is not seen.
        """
        for owner, key, value in self._sources:  # noqa: SIM110 - every token: no generator
            if owner.get(key) is not value:
                return False
        return True

    def __call__(self, x: mx.array) -> list[mx.array]:
        """Outputs of the packed linear layers for x (..., D): one (..., rows) array a child."""
        if self.quantization is None:
            y = x @ self.weight.T
        else:
            y = mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, **self.quantization
            )
        if self.bias is not None:
            y = y + self.bias
        return mx.split(y, self.splits, axis=-1)

    def gather(self, x: mx.array, experts: mx.array) -> list[mx.array]:
        """Outputs of the packed expert layers.

        Args:
            x: (..., 1, 1, D), as mlx_lm's SwitchGLU expands it.
            experts: (..., K), the chosen experts.
        Returns: one (..., K, 1, rows) array a child.
        """
        starts = [0, *self.splits]
        rhs = mx.concatenate([experts + s for s in starts], axis=-1) if self.splits else experts
        if self.quantization is None:
            y = mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=rhs)
        else:
            y = mx.gather_qmm(
                x,
                self.weight,
                self.scales,
                self.biases,
                rhs_indices=rhs,
                transpose=True,
                **self.quantization,
            )
        if self.bias is not None:
            y = y + mx.expand_dims(self.bias[rhs], -2)
        return mx.split(y, len(starts), axis=-3)


class Packs(dict[str, Packed]):
    """The packs of one module, by name."""

    def intact(self) -> bool:
        """Whether all of them are; see `Packed.intact`."""
        return all(map(Packed.intact, self.values()))

    def __deepcopy__(self, memo: dict) -> None:
        """A copied module holds its own arrays and no pack, until it is accelerated itself."""
        return None
