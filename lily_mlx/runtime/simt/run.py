"""Launches compiled kernels: memory, the launch record, and the checked path's copies."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from . import build
from .instrument import Site
from .signature import Parameter

STACK_BYTES = 256 << 10
MAX_THREADS = 1024
_SPARE_STACKS = 8  # simt::kSpareStacks
_STACK_OVERFLOW = 2  # simt::Abort
MAX_THREADGROUP_BYTES = 32 << 10

u8, u16, u32, u64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64


class Triple(ctypes.Structure):
    _fields_ = [("x", u32), ("y", u32), ("z", u32)]


class Launch(ctypes.Structure):
    """Mirrors simt::Launch in engine/launch.h."""

    _fields_ = [
        ("grid", Triple), ("group", Triple),
        ("buffers", ctypes.c_void_p), ("entry", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p), ("stack_size", u64),
        ("order", u32), ("seed", u32), ("check", u32), ("simd_orders", u32),
        ("regions", ctypes.c_void_p), ("n_regions", u32), ("max_regions", u32),
        ("faults", ctypes.c_void_p), ("n_faults", u32), ("max_faults", u32),
        ("shared_cells", ctypes.c_void_p), ("n_shared_cells", u64),
        ("module_begin", ctypes.c_void_p), ("module_end", ctypes.c_void_p),
        ("coalesce", ctypes.c_void_p), ("coalesce_size", u64),
        ("site_lines", ctypes.c_void_p), ("n_sites", u32), ("aborted", u32),
        ("simd_operations", u64), ("barriers", u64), ("float_operations", u64),
        ("threadgroup_bytes", u64), ("tables_full", u64),
    ]  # fmt: skip


@dataclass
class Buffer:
    """One buffer of a launch: its name, its memory as it is now, and whether it is an output.

    ``element`` is the float format that NaN checks read it by: "float32", "float16", "bfloat16" or
    "". ``initialized`` says that an output holds values already.
    """

    name: str
    data: np.ndarray
    output: bool = False
    element: str = ""
    initialized: bool = True


@dataclass
class Program:
    """A kernel ready to build: C++ text and parameters. Both builds happen on first use."""

    name: str
    text: str
    params: list[Parameter]
    loaded: dict[bool, tuple] = field(default_factory=dict)

    def library(self, checked: bool) -> tuple[ctypes.CDLL, list[Site]]:
        if checked not in self.loaded:
            self.loaded[checked] = build.kernel(self.text, checked)
        return self.loaded[checked]

    def slots(self) -> int:
        """How many pointers the entry point reads: buffers, then threadgroup arguments."""
        buffers = [p.index for p in self.params if p.kind == "buffer"]
        shared = [p.index for p in self.params if p.kind == "threadgroup"]
        return 1 + max(buffers, default=-1) + 1 + max(shared, default=-1)


@functools.cache
def _stacks() -> tuple[mmap.mmap, int]:
    """One stack a thread, touched only where used, above room for an overflow of the lowest."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    area = mmap.mmap(-1, STACK_BYTES * (MAX_THREADS + _SPARE_STACKS), flags=flags)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area)) + _SPARE_STACKS * STACK_BYTES


_lock = threading.Lock()  # the runtime's state is global
ORDERS = {"forward": 0, "reverse": 1, "random": 2}


def check_geometry(grid: tuple, threadgroup: tuple) -> tuple[tuple, tuple]:
    """The grid and threadgroup in threads, the threadgroup cut to the grid as MLX does.

    Raises ValueError for sizes that Metal refuses.
    """
    if len(grid) != 3 or len(threadgroup) != 3:
        raise ValueError("grid and threadgroup take 3 numbers each")
    if min(grid) < 0 or min(threadgroup) < 1:
        raise ValueError(
            f"grid {grid} or threadgroup {threadgroup} has a size that is not positive"
        )
    group = tuple(max(1, min(g, t)) for g, t in zip(grid, threadgroup, strict=True))
    threads = group[0] * group[1] * group[2]
    if threads > MAX_THREADS:
        raise ValueError(f"threadgroup {group} has {threads} threads; Metal allows {MAX_THREADS}")
    return tuple(grid), group


def prepare(
    program: Program,
    pointers: dict[int, int],
    shared: dict[int, int],
    grid: tuple,
    group: tuple,
    checked: bool,
) -> tuple[Launch, list]:
    """The launch record, and the objects that must outlive the launch.

    ``pointers`` maps buffer indices to addresses, ``shared`` threadgroup indices to addresses.
    """
    library, _ = program.library(checked)
    table = (ctypes.c_void_p * max(1, program.slots()))()
    buffers = 1 + max((p.index for p in program.params if p.kind == "buffer"), default=-1)
    for index, address in pointers.items():
        table[index] = address
    for index, address in shared.items():
        table[buffers + index] = address
    launch = Launch()
    launch.grid, launch.group = Triple(*grid), Triple(*group)
    launch.buffers = ctypes.addressof(table)
    launch.entry = ctypes.cast(library.simt_entry, ctypes.c_void_p).value
    launch.stacks, launch.stack_size = _stacks()[1], STACK_BYTES
    launch.order, launch.seed = ORDERS[_order[0]], _order[1]
    return launch, [table]


def run(launch: Launch, name: str) -> None:
    """Runs the grid to its end, or to the fault that stops it. One launch at a time.

    Raises RuntimeError if a thread's private arrays do not fit its stack.
    """
    with _lock:
        build.runtime().simt_run(ctypes.addressof(launch))
    if launch.aborted == _STACK_OVERFLOW:
        raise RuntimeError(f"{name}: a thread needs more than {STACK_BYTES >> 10} KB of stack")


_order = ("forward", 0)


@contextlib.contextmanager
def lane_order(order: str, seed: int = 0) -> Iterator[None]:
    """Runs the lanes and simdgroups of every launch in the block in another order.

    ``order`` is "forward" (as by default), "reverse" or "random", which ``seed`` repeats. A kernel
    whose result depends on it has a race.
    """
    global _order
    if order not in ORDERS:
        raise ValueError(f"lane order {order!r}: use one of {', '.join(ORDERS)}")
    before, _order = _order, (order, seed)
    try:
        yield
    finally:
        _order = before


def launch_fast(
    program: Program, buffers: dict[int, Buffer], shared: dict[int, int], grid: tuple, group: tuple
) -> None:
    """Runs the uninstrumented build on the buffers in place. ``shared`` gives bytes by index."""
    arrays = {i: np.empty(n, np.uint8) for i, n in shared.items()}
    pointers = {i: b.data.ctypes.data for i, b in buffers.items()}
    places = {i: a.ctypes.data for i, a in arrays.items()}
    launch, keep = prepare(program, pointers, places, grid, group, False)
    run(launch, program.name)
    del keep
