"""One file an architecture: which fused class takes the place of which mlx_lm class."""

from __future__ import annotations

import importlib

import mlx.nn as nn

# mlx_lm model module (mlx_lm/models/<name>.py) -> plan module here.
PLANS = {"qwen3_5_moe": "qwen3_5", "qwen3_5": "qwen3_5", "qwen3_next": "qwen3_5"}


def plan_for(model: nn.Module) -> dict[type, type] | None:
    """The plan {mlx_lm class: fused class} for `model`, or None if its architecture has none."""
    package, _, name = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in PLANS:
        return None
    return importlib.import_module(f"{__name__}.{PLANS[name]}").PLAN
