"""The MLX-LM load hook: put fused layers into a model, take them out, do it at every load."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from .layers.base import Fused
from .plans import plan_for

_lock = threading.RLock()


@dataclass(frozen=True)
class Report:
    """What `accelerate` did to a model.

    Attributes:
        architecture: mlx_lm's name of it, e.g. "qwen3_5_moe".
        fused: {path of a module: name of the fused class it has now}.
        left: {path of a module, "" for the whole model: why it stays mlx_lm's}.
    """

    architecture: str
    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line, e.g. `qwen3_5_moe: 32 parts fused, 0 left to mlx_lm`."""
        reasons = "; ".join(dict.fromkeys(self.left.values()))
        parts = "part" if len(self.fused) == 1 else "parts"
        line = f"{self.architecture}: {len(self.fused)} {parts} fused, {len(self.left)} left"
        return f"{line} to mlx_lm" + (f" ({reasons})" if reasons else "")


def accelerate(model: nn.Module) -> Report:
    """Give the layers of an mlx_lm model their fused classes, in place.

    The parameter tree keeps its names, shapes, dtypes and values, and nothing is held twice. A
    layer that cannot be fused stays as it is. The first layer of each fused class is run against
    mlx_lm's on random input; a class that disagrees or fails is not used, with a line on stderr.
    Calling it again is safe, and picks up what changed (an adapter removed, new weights).

    Args:
        model: a model from `mlx_lm.load`, evaluated.
    Returns: what was fused and what was left, and why.
    Raises: TypeError if `model` is not an mlx.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate() takes an mlx.nn.Module, not {type(model).__name__}")
    with _lock:
        report = Report(type(model).__module__.rpartition(".")[2])
        plan = plan_for(model)
        if plan is None:
            report.left[""] = "no plan for this architecture"
            return report
        refused: dict[type, str] = {}
        proven: set[type] = set()
        for path, module in model.named_modules():
            if isinstance(module, Fused):
                if module._packs is not None and module._packs.intact():
                    report.fused[path] = type(module).__name__
                    proven.add(type(module))
                    continue
                _release(module)
            fused = plan.get(type(module))
            if fused is None:
                continue
            reason = refused.get(fused) or fused.unfit(module)
            if reason is None:
                _swap(module, fused)
                if fused not in proven and (reason := _disagrees(module)):
                    refused[fused] = reason
                    print(f"lily_mlx: {fused.__name__} is not used: {reason}", file=sys.stderr)
            if reason is None:
                proven.add(fused)
                report.fused[path] = fused.__name__
            else:
                _release(module)
                report.left[path] = reason
        return report


def restore(model: nn.Module) -> None:
    """Give every fused layer of `model` its mlx_lm class back. Values are bit for bit the same."""
    with _lock:
        for module in model.modules():
            _release(module)


def install() -> None:
    """Make every later load of a model through mlx_lm accelerate it.

    All of mlx_lm's programs load through `mlx_lm.utils.load_model`, whatever name they imported.
    Models loaded lazily (to convert, quantize or shard them) are left alone: `accelerate` them
    once they are evaluated. Calling it again does nothing.
    """
    utils = importlib.import_module("mlx_lm.utils")
    with _lock:
        stock = utils.load_model
        if hasattr(stock, "_lily_stock"):
            return

        @functools.wraps(stock)
        def load_model(model_path, lazy=False, *args, **kwargs):
            model, config = stock(model_path, lazy, *args, **kwargs)
            if not lazy:
                report = accelerate(model)
                if not report.fused:
                    print(f"lily_mlx: {report}", file=sys.stderr)
            return model, config

        load_model._lily_stock = stock
        utils.load_model = load_model


def uninstall() -> None:
    """Undo `install`. Models already loaded stay as they are; see `restore`."""
    utils = importlib.import_module("mlx_lm.utils")
    with _lock:
        utils.load_model = getattr(utils.load_model, "_lily_stock", utils.load_model)


def _swap(module: nn.Module, fused: type[Fused]) -> None:
    fused.pack(module)  # before the class: another thread may be calling this module
    module.__class__ = fused


def _release(module: nn.Module) -> None:
    if isinstance(module, Fused):
        module.__class__ = _stock(module)
        del module._packs


def _stock(module: Fused) -> type[nn.Module]:
    return type(module).__mro__[2]  # class X(Fused, Stock)


def _disagrees(module: Fused) -> str | None:
    """Why `module`'s fused path cannot stand for mlx_lm's, by running both; None if it can."""
    training, module._training = module._training, False
    try:
        args = module.probe(mx.random.key(0))
        stock = _stock(module).__call__(module, *args).astype(mx.float32)
        off = mx.linalg.norm(module(*args).astype(mx.float32) - stock) / mx.linalg.norm(stock)
        off = off.item()
    except Exception as e:  # whatever a later mlx_lm changed, its own path still works
        return f"{type(e).__name__}: {' '.join(str(e).split())}"
    finally:
        module._training = training
    # Two orders of a bf16 sum differ by parts in a thousand, a wrong weight by the whole.
    return None if off < 0.02 else f"differs from mlx_lm by {off:.1%} on random input"
