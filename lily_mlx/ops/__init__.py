"""One module a family of kernels: launch, MLX reference, random inputs and bytes of each op."""

from __future__ import annotations

import importlib
import pkgutil

from ..runtime import Op


def all_ops() -> dict[str, Op]:
    """Every op there is, by name; imports each module of this package."""
    modules = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    found = (value for module in modules for value in vars(module).values())
    return {value.name: value for value in found if isinstance(value, Op)}
