"""The checked launch: guarded copies of the buffers, shadow memory, and what the checker found."""

from __future__ import annotations

import ctypes
import functools
import mmap

import numpy as np

from . import build
from .instrument import Site
from .report import KINDS, BufferCounts, Fault, Report, Row
from .run import MAX_THREADGROUP_BYTES, Buffer, Launch, Program, Triple, prepare, run, u16, u32, u64

_GAP = 1 << 20  # unregistered bytes around each buffer
_NO_SITE = 0xFFFFFFFF
_MAX_REGIONS, _MAX_FAULTS = 128, 256
_SHARED_CELLS = 1 << 17
_ELEMENTS = {"": 0, "float32": 1, "float16": 2, "bfloat16": 3}
_SCALARS = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


class _Cell(ctypes.Structure):
    _fields_ = [("epochs", u32 * 2), ("who", u16 * 2), ("sync", u16 * 2)]


class _Region(ctypes.Structure):
    _fields_ = [
        ("base", u64), ("size", u64), ("kind", u32), ("element", u32),
        ("cells", ctypes.c_void_p), ("name", ctypes.c_char_p),
        ("loaded", u64), ("stored", u64), ("accesses", u64), ("lines", u64),
        ("fewest_lines", u64), ("redundant", u64), ("group_stamp", u32), ("written_before", u32),
    ]  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", u32), ("site", u32), ("file", ctypes.c_char_p), ("line", u32), ("count", u32),
        ("group", Triple), ("thread", u32), ("what", ctypes.c_char_p), ("offset", ctypes.c_int64),
        ("size", u32), ("other", u32), ("write", u32),
    ]  # fmt: skip


@functools.cache
def _table_bytes() -> int:
    """The size of the engine's coalescing tables, without their turns: u32 a site and lane."""
    sizes = (u64 * 5).in_dll(build.runtime(), "simt_sizes")
    mirrors = [ctypes.sizeof(mirror) for mirror in (Launch, _Region, _Fault, _Cell)]
    if list(sizes)[:4] != mirrors:
        raise RuntimeError(f"the engine's structs have sizes {list(sizes)[:4]}, not {mirrors}")
    return sizes[4]


def _extent(data: np.ndarray) -> tuple[int, int]:
    """The first and the past-the-last byte of an array, counted from its first element."""
    if not data.size:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(data.shape, data.strides, strict=True)]
    return sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + data.itemsize


def _flat(data: np.ndarray) -> np.ndarray:
    """The bytes that an array spans, those between strided elements too."""
    low, high = _extent(data)
    if low == high:
        return np.empty(0, np.uint8)
    return np.frombuffer(
        (ctypes.c_uint8 * (high - low)).from_address(data.ctypes.data + low), np.uint8
    )


class _Arena:
    """Copies of the buffers, far apart in one sparse mapping."""

    def __init__(self, buffers: dict[int, Buffer], shared: dict[int, int]):
        flat = {i: _flat(b.data) for i, b in buffers.items()}
        sizes = {("buffer", i): f.nbytes for i, f in flat.items()}
        sizes |= {("shared", i): n for i, n in shared.items()}
        self._offsets, at = {}, _GAP
        for key, size in sizes.items():
            self._offsets[key] = at
            at += (size + 4095) // 4096 * 4096 + _GAP
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._area = mmap.mmap(-1, at, flags=flags)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self.addresses = {key: base + offset for key, offset in self._offsets.items()}
        self._bytes = np.frombuffer(self._area, np.uint8)
        for i, f in flat.items():
            self.view(i, f.nbytes)[:] = f

    def view(self, index: int, size: int) -> np.ndarray:
        """The bytes of a buffer's copy."""
        at = self._offsets["buffer", index]
        return self._bytes[at : at + size]


def launch_checked(
    program: Program,
    buffers: dict[int, Buffer],
    shared: dict[int, int],
    grid: tuple,
    group: tuple,
    report: Report,
) -> None:
    """Runs the instrumented build on guarded copies, adds to the report, copies outputs back."""
    library, sites = program.library(True)
    arena = _Arena(buffers, shared)
    starts = {i: arena.addresses["buffer", i] for i in buffers}
    pointers = {i: starts[i] - _extent(b.data)[0] for i, b in buffers.items()}
    places = {i: arena.addresses["shared", i] for i in shared}
    launch, keep = prepare(program, pointers, places, grid, group, True)
    regions = (_Region * _MAX_REGIONS)()
    cells = []
    for n, (i, b) in enumerate(buffers.items()):
        r = regions[n]
        r.base, r.size = starts[i], _flat(b.data).nbytes
        r.kind, r.element = int(b.output), _ELEMENTS[b.element]
        r.name, r.written_before = b.name.encode(), b.initialized
        if b.output:
            cells.append(np.zeros(b.data.nbytes * ctypes.sizeof(_Cell), np.uint8))
            r.cells = cells[-1].ctypes.data
    for n, (i, size) in enumerate(shared.items(), len(buffers)):
        r = regions[n]
        r.base, r.size, r.kind = places[i], size, 2
        r.name = f"threadgroup argument {i}".encode()
    faults = (_Fault * _MAX_FAULTS)()
    shared_cells = np.zeros(_SHARED_CELLS * ctypes.sizeof(_Cell), np.uint8)
    tables = np.zeros(_table_bytes() + 4 * 32 * max(1, len(sites)), np.uint8)
    module = (ctypes.c_void_p * 2)()
    library.simt_module(module)
    launch.check, launch.simd_orders = 1, report.simd_orders
    launch.regions, launch.n_regions = ctypes.addressof(regions), len(buffers) + len(shared)
    launch.max_regions, launch.max_faults = _MAX_REGIONS, _MAX_FAULTS
    launch.faults = ctypes.addressof(faults)
    launch.shared_cells, launch.n_shared_cells = shared_cells.ctypes.data, _SHARED_CELLS
    launch.module_begin, launch.module_end = module[0], module[1]
    launch.coalesce, launch.coalesce_size = tables.ctypes.data, tables.nbytes
    numbers = {}
    lines = [numbers.setdefault(s, len(numbers)) if s.line else _NO_SITE for s in sites]
    site_lines = np.array([*lines, 0], np.uint32)
    launch.site_lines, launch.n_sites = site_lines.ctypes.data, len(sites)
    launch.threadgroup_bytes = sum(shared.values())
    run(launch, program.name)
    del keep
    if launch.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        raise ValueError(
            f"{program.name} uses {launch.threadgroup_bytes} bytes of threadgroup memory; "
            f"Metal allows {MAX_THREADGROUP_BYTES}"
        )
    for i, b in buffers.items():
        if b.output:
            _flat(b.data)[:] = arena.view(i, b.data.nbytes)
    elements = {b.name: b.element for b in buffers.values()}
    for f in faults[: launch.n_faults] if report.check else ():
        report.faults.append(_fault(program.name, f, sites, elements))
    counts = {}
    written = iter(cells)
    for n, b in enumerate(buffers.values()):
        r = regions[n]
        counts[b.name] = BufferCounts(r.loaded, r.stored, r.lines, r.fewest_lines, r.redundant)
        if b.output:
            epochs = next(written).view(np.uint32).reshape(-1, 4)[:, 0]
            counts[b.name].unwritten = int((epochs == 0).sum())
    own = regions[len(buffers) : launch.n_regions]
    report.rows.append(
        Row(
            program.name,
            grid,
            group,
            counts,
            launch.simd_operations,
            launch.barriers,
            launch.threadgroup_bytes,
            sum(r.loaded for r in own),
            sum(r.stored for r in own),
            launch.float_operations,
            launch.tables_full,
            bool(launch.aborted),
        )
    )


def _fault(kernel: str, f: _Fault, sites: list[Site], elements: dict[str, str]) -> Fault:
    kind = KINDS[f.kind]
    site = sites[f.site] if f.site != _NO_SITE else Site("?", 0)
    if f.file and (f.site == _NO_SITE or kind == "nan_born"):
        site = Site(f.file.decode(), f.line)
    what = (f.what or b"?").decode()
    verb = "write" if f.write else "read"
    place = f"{f.size} bytes at byte {f.offset} of {what}"
    other = f"thread {f.other}" if f.other < 1024 else "other threads"
    if kind == "out_of_bounds" and f.site == _NO_SITE:
        detail = f"index {f.offset} into {what}"
    elif kind == "out_of_bounds" or (kind == "integer_overflow" and f.site != _NO_SITE):
        detail = f"{verb} of {place}"
        if f.file:
            detail += f", after unsigned arithmetic wrapped at {f.file.decode()}:{f.line}"
    elif kind == "integer_overflow":
        detail = f"signed {what} overflows"
    elif kind == "uninitialized_read":
        detail = f"read of {place}, never written"
    elif kind == "missing_lane" and f.size == 0:
        detail = f"{what} takes the value of lane {f.other}, which is not there"
    elif kind == "missing_lane":
        where = "had ended" if f.other == _NO_SITE else f"waited at line {f.other}"
        detail = f"{f.size} threads did not reach {what}; this one {where}"
    elif kind == "race":
        detail = f"{verb} of {place} with no barrier after an access by {other}"
    elif kind == "double_write":
        detail = f"write of {place}, which {other} (maybe of another threadgroup) wrote before"
    elif kind == "nan_born":
        store = sites[f.other] if f.other < len(sites) else Site("?", 0)
        detail = f"NaN out of operands without one, stored to {what} at {store.file}:{store.line}"
        if elements.get(what):
            detail += f" as {_SCALARS[elements[what]]}"
    else:
        detail = "integer division by zero"
    group = (f.group.x, f.group.y, f.group.z)
    return Fault(kind, kernel, site.file, site.line, group, f.thread, detail, f.count)
