"""What tests share: the backends that run here, and Metal kernels that are not lily_mlx's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta

from lily_mlx.runtime import backends

BACKENDS = {
    "metal": (mx.metal.is_available(), "needs a Mac"),
    "cuda": (mx.cuda.is_available(), "needs MLX's CUDA build and a GPU"),
    "simt": (importlib.util.find_spec("ziglang") is not None, "needs the ziglang package"),
}
MARKS = {"cuda": [pytest.mark.cuda]}
each_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.skipif(not can, reason=why), *MARKS.get(name, [])])
        for name, (can, why) in BACKENDS.items()
    ],
)


@contextmanager
def running(backend: str) -> Iterator[None]:
    """Kernels on a backend, their outputs poisoned; on the executor, with every check it has."""
    if backend == "simt":
        from lily_mlx.runtime import simt

        with backends.using("simt"), simt.record() as report:
            yield
        assert not report.faults, "\n".join(map(str, report.faults))
    else:
        with backends.using(backend, init_value=float("nan")):
            yield


def fresh_key() -> mx.array:
    """A key that differs in each run and follows LILY_SEED."""
    return mx.random.key(mx.random.randint(0, 2**31 - 1).item())


def metal_kernel(backend: str) -> Callable[..., Callable[..., list[mx.array]]]:
    """What a backend has in place of `mx.fast.metal_kernel`, which takes any Metal text."""
    if backend == "cuda":
        from lily_mlx.runtime import cuda

        return cuda.metal_kernel
    if backend == "simt":
        from lily_mlx.runtime import simt

        return simt.metal_kernel
    return mx.fast.metal_kernel


def gated_delta_kernels(make: Callable[..., object]) -> dict[str, object]:
    """mlx_lm's gated delta kernels, made by `make` from the text of the installed package."""
    with (
        mock.patch.object(mx.metal, "is_available", lambda: True),
        mock.patch.object(mx.fast, "metal_kernel", make),
    ):
        return {
            "step": gated_delta._make_gated_delta_kernel(),
            "mask": gated_delta._make_gated_delta_kernel(has_mask=True),
            "vector": gated_delta._make_gated_delta_kernel(vectorized=True),
            "packed": gated_delta._make_gated_delta_packed_kernel(),
        }
