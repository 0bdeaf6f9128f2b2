"""Where kernels run, and the callable for each.

metal      `mx.fast.metal_kernel`, on a Mac
cuda       `mx.fast.cuda_kernel`, the same text translated, on MLX's CUDA build
simt       the CPU executor of Metal text: eager and slow, for tests
reference  no kernel at all: each op runs its plain MLX reference

The choice is by device, once a process; the environment variable LILY_BACKEND overrides it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from . import source

NAMES = ("metal", "cuda", "simt", "reference")
PREFIX = "lily_"  # of MLX's name for a kernel, as it shows in a GPU trace
SIMDGROUP = 32

MAX_THREADS = 1024  # of a threadgroup

if os.environ.get("LILY_BACKEND") == "simt":
    # It runs kernels at once, on values that a trace has not got: before any trace begins.
    mx.disable_compile()

_chosen: str | None = None
_extra: dict[str, Any] = {}


def backend() -> str:
    """Name of the backend in use. Raises: ValueError if LILY_BACKEND names none that can run."""
    global _chosen
    if _chosen is None:
        _chosen = _choose()
    return _chosen


def _choose() -> str:
    devices = {"metal": mx.metal.is_available, "cuda": mx.cuda.is_available}
    name = os.environ.get("LILY_BACKEND", "")
    if not name:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        return next((n for n, has in devices.items() if on_gpu and has()), "reference")
    if name not in NAMES:
        raise ValueError(f"LILY_BACKEND={name}: it must be one of {', '.join(NAMES)}")
    if name in devices and not devices[name]():
        raise ValueError(f"LILY_BACKEND={name}: this build of MLX has no {name} device")
    if name == "simt" and importlib.util.find_spec("ziglang") is None:
        raise ValueError(f"LILY_BACKEND={name}: its compiler is missing; pip install ziglang")
    return name


@contextmanager
def using(name: str, **extra: Any) -> Iterator[None]:
    """Run kernels on another backend for a while; for tests, not safe with other threads.

    `extra` goes to each launch, e.g. `verbose=True` or `init_value=float("nan")`.
    """
    global _chosen, _extra
    before = _chosen, _extra
    _chosen, _extra = name, extra
    kernel.cache_clear()
    try:
        yield
    finally:
        _chosen, _extra = before
        kernel.cache_clear()


class Kernel:
    """A kernel as a callable; `kernel(name)` makes it."""

    __slots__ = ("_launch", "_template", "name")

    def __init__(self, name: str, template: Sequence[str], launch: Callable[..., list[mx.array]]):
        self.name = name
        self._template = set(template)
        self._launch = launch

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: dict[str, Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Launch it.

        Args:
            inputs: in the order of the kernel's parameters, none of them 0-d.
            template: {template parameter: dtype, int or bool}, each of them.
            grid: in threads, whole threadgroups in each dimension.
            threadgroup: threads of a threadgroup, whole simdgroups of 32.
            output_shapes, output_dtypes: one for each output.
        Raises: ValueError if the launch is ragged or the template is not the kernel's.
        """
        if template.keys() != self._template:
            raise ValueError(f"{self.name} takes the template arguments {sorted(self._template)}")
        (gx, gy, gz), (tx, ty, tz) = grid, threadgroup
        # A ragged edge would leave lanes out of simd_sum, and CUDA rounds the grid up.
        threads = tx * ty * tz
        if gx % tx or gy % ty or gz % tz or threads % SIMDGROUP or threads > MAX_THREADS:
            raise ValueError(
                f"{self.name}: grid {grid} must be whole threadgroups of {threadgroup} threads, "
                f"and those whole simdgroups of {SIMDGROUP}, at most {MAX_THREADS}"
            )
        return self._launch(
            inputs=inputs,
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )


@functools.cache
def kernel(name: str) -> Kernel:
    """The kernel of `metal_kernels/<name>.metal` on the backend in use, built once a process.

    Raises: SourceError, ValueError on the reference backend, ImportError if simt cannot run here.
    """
    return build(source.load(name), backend())


def build(text: source.Source, name: str) -> Kernel:
    """The kernel of a source on the backend called `name`."""
    makers = {"metal": _metal, "cuda": _cuda, "simt": _simt}
    if name not in makers:
        raise ValueError(f"the {name} backend runs no kernels")
    launch = makers[name](text)
    if _extra:
        launch = functools.partial(launch, **_extra)
    return Kernel(text.name, tuple(text.template), launch)


@functools.lru_cache(maxsize=256)
def scalar(value: float, dtype: mx.Dtype = mx.float32) -> mx.array:
    """A number as the array of one element that a kernel takes; the same array for each call."""
    return mx.array([value], dtype)


def _arguments(text: source.Source) -> dict[str, Any]:
    return {
        "name": PREFIX + text.name,
        "input_names": list(text.inputs),
        "output_names": list(text.outputs),
        "ensure_row_contiguous": text.contiguous,
    }


def _metal(text: source.Source) -> Callable[..., list[mx.array]]:
    return mx.fast.metal_kernel(source=text.body, header=text.header, **_arguments(text))


def _cuda(text: source.Source) -> Callable[..., list[mx.array]]:
    from . import cuda

    header, body = cuda.translate(text.header, text.body)
    return mx.fast.cuda_kernel(source=body, header=header, **_arguments(text))


def _simt(text: source.Source) -> Callable[..., list[mx.array]]:
    from . import simt

    # The shipped tokens, on the lines of their files: its findings name them.
    run = simt.metal_kernel(source=text.debug_body, header=text.debug_header, **_arguments(text))

    def launch(inputs: Sequence[mx.array], **rest: Any) -> list[mx.array]:
        @mx.custom_function
        def call(*arrays: mx.array) -> list[mx.array]:
            return run(inputs=list(arrays), **rest)

        @call.vjp
        def vjp(*_: Any) -> None:  # as MLX's own kernels, where it is an error too
            raise ValueError(f"[vjp] {text.name} has no gradient")

        return call(*inputs)

    return launch
