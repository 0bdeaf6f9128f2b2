"""The public callables: metal_kernel, function and record."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from .check import launch_checked
from .report import Report
from .rewrite import translate
from .run import MAX_THREADGROUP_BYTES, Buffer, Program, check_geometry, launch_fast
from .signature import Parameter, instantiation, mlx_metal_kernel, mlx_text

_MLX_HEADERS = Path(mx.__file__).parent / "include"
_PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'  # as MLX puts before a custom kernel
_NUMPY = {
    mx.bool_: np.bool_, mx.uint8: np.uint8, mx.uint16: np.uint16, mx.uint32: np.uint32,
    mx.uint64: np.uint64, mx.int8: np.int8, mx.int16: np.int16, mx.int32: np.int32,
    mx.int64: np.int64, mx.float16: np.float16, mx.float32: np.float32, mx.bfloat16: np.uint16,
    mx.complex64: np.complex64,
}  # fmt: skip
_FLOATS = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}

_active: Report | None = None


@contextlib.contextmanager
def record(check: bool = True, simd_orders: bool = False) -> Iterator[Report]:
    """Collects faults and counts of every launch in the block.

    With ``check`` false only the counts are kept. ``simd_orders`` makes every simd function order
    the memory of its simdgroup, which GPUs do and MSL does not promise; by default only barriers
    do. A launch that leaves its buffers or divides by zero stops there: its outputs keep what was
    written, and its row says ``aborted``.
    """
    global _active
    before, _active = _active, Report(check, simd_orders)
    try:
        yield _active
    finally:
        _active = before


def _host(array: mx.array) -> np.ndarray:
    """A view of an evaluated array's memory; bfloat16 as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    try:
        mx.eval(array)
    except ValueError as error:
        raise ValueError(
            f"the CPU executor runs a kernel at once and cannot be traced: "
            f"call mx.disable_compile() first ({error})"
        ) from None
    return np.asarray(memoryview(array)) if array.size else np.empty(array.shape, np.uint8)


def _poisoned(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray:
    """Memory whose every byte is 0xff: NaN as a float."""
    out = np.empty(shape, _NUMPY[dtype])
    out.reshape(-1).view(np.uint8)[:] = 0xFF
    return out


def _device(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    out = mx.array(array)
    return out.view(mx.bfloat16) if dtype == mx.bfloat16 else out


def _launch(program: Program, buffers: dict[int, Buffer], shared: dict[int, int], grid, group):
    needed = {p.index for p in program.params if p.kind == "buffer"}
    if missing := needed - set(buffers):
        names = [p.name for p in program.params if p.kind == "buffer" and p.index in missing]
        raise ValueError(f"{program.name}: no buffer given for {', '.join(names)}")
    if sum(shared.values()) > MAX_THREADGROUP_BYTES:
        raise ValueError(
            f"{program.name} takes {sum(shared.values())} bytes of threadgroup memory; "
            f"Metal allows {MAX_THREADGROUP_BYTES}"
        )
    if 0 in grid:
        return
    if _active is not None:
        launch_checked(program, buffers, shared, grid, group, _active)
    else:
        launch_fast(program, buffers, shared, grid, group)


@functools.lru_cache(maxsize=4096)
def _custom_program(text: str, name: str) -> Program:
    body, expression = instantiation(text)
    # Bound by name below; the kernel's mangled name differs for each instantiation.
    cpp, params = translate(
        f'{_PRELUDE}#line 1 "{name}"\n{body}', name, expression, [_MLX_HEADERS], {}
    )
    return Program(name, cpp, params)


def _bind(
    params: list[Parameter], inputs: dict[str, np.ndarray], outputs: dict[str, Buffer]
) -> dict[int, Buffer]:
    """The buffers of an MLX custom kernel: inputs, what MLX derives from them, outputs."""
    buffers = {}
    for p in params:
        if p.kind != "buffer":
            continue
        if p.name in outputs:
            buffers[p.index] = outputs[p.name]
            continue
        if p.name in inputs:
            data = inputs[p.name]
        else:
            owner, _, what = p.name.rpartition("_")
            array = inputs[owner]
            strides = [s // array.itemsize for s in array.strides]
            data = {
                "shape": lambda a=array: np.array(a.shape, np.int32),
                "strides": lambda s=strides: np.array(s, np.int64),
                "ndim": lambda a=array: np.array(a.ndim, np.int32),
            }[what]()
        buffers[p.index] = Buffer(p.name, data)
    return buffers


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> Callable[..., list[mx.array]]:
    """``mx.fast.metal_kernel`` on the CPU: same arguments, same generated text, evaluated at once.

    The callable takes ``inputs``, ``output_shapes``, ``output_dtypes``, ``grid``, ``threadgroup``
    and optionally ``template``, ``init_value``, ``verbose`` and ``stream`` (ignored), and returns
    the outputs. Outputs start as 0xff bytes unless ``init_value`` is given. Errors for arguments
    that do not fit are MLX's own; BuildError carries the compiler's message.
    """
    kernel = mlx_metal_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
    )

    def call(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None,
             init_value=None, verbose=False, stream=None):  # fmt: skip
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        options = {"template": template} if template else {}
        text = mlx_text(
            kernel,
            arrays,
            dict(output_shapes=output_shapes, output_dtypes=output_dtypes, grid=grid,
                 threadgroup=threadgroup, verbose=verbose, **options),
        )  # fmt: skip
        grid, group = check_geometry(tuple(grid), tuple(threadgroup))
        program = _custom_program(text, name)
        views = {}
        for key, array in zip(input_names, arrays, strict=True):
            view = _host(array)
            if ensure_row_contiguous and not view.flags.c_contiguous:
                view = np.ascontiguousarray(view)
            views[key] = view
        outputs = {}
        for key, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True):
            if init_value is None:
                data = _poisoned(shape, dtype)
            else:
                data = np.array(_host(mx.full(shape, init_value, dtype)))
            outputs[key] = Buffer(key, data, True, _FLOATS.get(dtype, ""), init_value is not None)
        _launch(program, _bind(program.params, views, outputs), {}, grid, group)
        return [
            _device(outputs[k].data, d) for k, d in zip(output_names, output_dtypes, strict=True)
        ]

    return call


def function(
    text: str,
    expression: str,
    *,
    name: str | None = None,
    constants: dict[int, object] | None = None,
    include_dirs: Sequence[str | Path] = (),
) -> Callable[..., list[mx.array]]:
    """A kernel of any MSL text, such as one that MLX ships.

    ``expression`` names the kernel function, with template arguments if it is a template;
    ``constants`` gives function constants by index; quoted includes are searched in
    ``include_dirs`` and among MLX's headers.

    The callable takes ``buffers`` (by index: mx.array, numpy array or bytes, read only),
    ``outputs`` (by index: a (shape, dtype) pair, or an mx.array whose values it starts with),
    ``grid`` and ``threadgroup`` in threads, and ``threadgroup_bytes`` by index. It returns the
    outputs in index order.
    """
    dirs = [*map(Path, include_dirs), _MLX_HEADERS]
    title = name or expression.split("<")[0]
    cpp, params = translate(text, title, expression, dirs, constants or {})
    program = Program(title, cpp, params)
    names = {p.index: p.name for p in params if p.kind == "buffer"}

    def call(*, buffers, outputs, grid, threadgroup, threadgroup_bytes=None):
        bound = {}
        for i, value in buffers.items():
            if isinstance(value, bytes):
                value = np.frombuffer(value, np.uint8)
            elif isinstance(value, mx.array):
                value = np.ascontiguousarray(_host(value))
            bound[i] = Buffer(names.get(i, f"buffer {i}"), value)
        dtypes = {}
        for i, value in outputs.items():
            given = isinstance(value, mx.array)
            dtypes[i] = value.dtype if given else value[1]
            data = np.array(_host(value)) if given else _poisoned(*value)
            element = _FLOATS.get(dtypes[i], "")
            bound[i] = Buffer(names.get(i, f"buffer {i}"), data, True, element, given)
        if unknown := set(bound) - set(names):
            raise ValueError(f"{title} has no buffer {', '.join(map(str, sorted(unknown)))}")
        for p in params:
            if p.kind == "buffer" and p.optional and p.index not in bound:
                bound[p.index] = Buffer(p.name, np.empty(0, np.uint8))
        shape, group = check_geometry(tuple(grid), tuple(threadgroup))
        _launch(program, bound, dict(threadgroup_bytes or {}), shape, group)
        return [_device(bound[i].data, dtypes[i]) for i in sorted(outputs)]

    return call
