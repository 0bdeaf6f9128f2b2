"""The shipped kernels, and the variants and sizes that each is compiled and proven at.

One row a kernel: `variants` are what `op.inputs` takes after the key, `sizes` its awkward sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from lily_mlx.ops import norm
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


KERNELS = [
    Row(
        norm.rms_norm_gated,
        variants=list(product(FLOATS, (1, 33, 128, 257))),
        sizes=[{"lead": (1,)}, {"lead": (7,)}, {"lead": (2, 5, 8)}],
        stock=_qwen3_next_norm,
    ),
]


def cases() -> Iterator[tuple[Op, tuple[Any, ...], dict[str, Any]]]:
    """Each variant at its default size, then at each awkward one."""
    for row in KERNELS:
        for variant, size in product(row.variants, [{}, *row.sizes]):
            yield row.op, variant, size
