"""Puts the checker's calls into LLVM IR text.

Each load, store, copy and atomic access of a kernel calls the checker with its address, size and
site; each float operation with its operands and result. A site is an instruction: its file and
line come from the debug information, those of the caller where the code is the executor's own.
Working on the optimised IR keeps private variables, which live in registers, out of it. The text
form is that of the pinned compiler; a memory access of an unknown form is an error, not a gap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ENTRY_FILE = "entry"  # names the entry point's code in the debug information
_HEADERS = str(Path(__file__).resolve().parent / "include")

# One operation each, but for a fused multiply-add, which is two.
_MATH = (
    r"(?:llvm\.)?(fma|fmuladd|sqrt|exp|exp2|exp10|log|log2|log10|sin|cos|tan|pow|asin|acos|atan|"
    r"atan2|sinh|cosh|tanh|asinh|acosh|atanh|fmod|erf|expm1|log1p|cbrt)f?(?:\.f32|\.f16|\.v\d+f\d+)?"
)
_TYPE = r"(?:<\d+ x (?:float|half)>|float|half)"
_OPERATION = re.compile(
    rf"^\s+(%[\w.]+) = f(?:add|sub|mul|div|rem)(?: \w+)*? ({_TYPE}) ([^,]+), ([^,\s]+)"
)
_CALL = re.compile(
    rf"^\s+(%[\w.]+) = (?:tail |notail )?call(?: \w+)*? ({_TYPE}) @{_MATH}\((.*?)\)(?:,| #|$)"
)
_POINTER = r"(getelementptr [^()]*\((?:[^()]|\([^()]*\))*\)|[%@][^,\s]+)"
_LOAD = re.compile(rf"^\s+%[\w.]+ = load (atomic )?(?:volatile )?(.+?), ptr {_POINTER}")
_VALUE = r"(?:[a-z ]+\((?:[^()]|\([^()]*\))*\)|<[^>]*>|[^,\s]+)"
_STORE = re.compile(
    rf"^\s+store (atomic )?(?:volatile )?(<[^>]*>|\[[^\]]*\]|\S+) {_VALUE}, ptr {_POINTER}"
)
_COPY = re.compile(r"^\s+(?:tail )?call void @llvm\.mem(cpy|move|set)\.[\w.]+\((.*)\)")
_ACCESS = re.compile(
    r"^\s+(?:%[\w.]+ = )?(?:(?:load|store|atomicrmw|cmpxchg)\b|"
    r"(?:tail )?call .*@llvm\.(?:mem(?:cpy|move|set)|masked))"
)
_DOUBLE = re.compile(r"^\s+%[\w.]+ = f(?:add|sub|mul|div|rem|ptrunc)\b.*\bdouble\b")
_DECLARATIONS = """
declare void @simt_load(ptr, i64, i32)
declare void @simt_store(ptr, i64, i32)
declare void @simt_stored(ptr, i64, i32)
declare void @simt_atomic(ptr, i64, i32)
declare void @simt_atomic_store(ptr, i64, i32)
declare void @simt_float(float, float, float, float, i32, i32)
declare void @simt_count(i32)
"""


@dataclass(frozen=True)
class Site:
    """Where an instruction came from. Line 0 is the executor's own code."""

    file: str
    line: int


def _size(kind: str) -> int:
    """The size in bytes of an IR type."""
    scalar = {"float": 4, "double": 8, "half": 2, "bfloat": 2, "ptr": 8}
    if kind in scalar:
        return scalar[kind]
    if found := re.fullmatch(r"i(\d+)", kind):
        return (int(found[1]) + 7) // 8
    if found := re.fullmatch(r"[<\[](\d+) x (.+)[>\]]", kind):
        return int(found[1]) * _size(found[2])
    raise NotImplementedError(f"an access of the IR type {kind}")


def _arguments(text: str) -> list[str]:
    """The operands of a call, without their types and attributes."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    operands = []
    for part in (*parts, text[last:]):
        constant = re.search(r"\b(?:getelementptr|inttoptr)\b.*$", part)
        operands.append(constant[0] if constant else part.split()[-1])
    return operands


class _Metadata:
    """The debug locations of a module, as text nodes by number."""

    def __init__(self, ir: str):
        self.nodes = dict(re.findall(r"^!(\d+) = (.*)$", ir, re.M))
        self._sites: dict[str, Site] = {}

    def _field(self, node: str, name: str) -> str | None:
        found = re.search(rf"\b{name}: !?(\d+)", self.nodes.get(node, ""))
        return found[1] if found else None

    def _file(self, scope: str) -> str:
        node = self.nodes.get(self._field(scope, "file") or "", "")
        found = re.search(r'filename: "([^"]*)"', node)
        return found[1] if found else "?"

    def site(self, line: str) -> Site:
        """The innermost place outside the executor's headers that the instruction stems from."""
        found = re.search(r"!dbg !(\d+)", line)
        if not found:
            return Site("?", 0)
        if found[1] not in self._sites:
            self._sites[found[1]] = self._resolve(found[1])
        return self._sites[found[1]]

    def _resolve(self, node: str | None) -> Site:
        while node is not None:
            scope = self._field(node, "scope") or ""
            file = self._file(scope)
            # The compiler gives line 0 to what it merged: its scope's first line is near.
            number = int(self._field(node, "line") or 0) or int(self._field(scope, "line") or 0)
            if number and not file.startswith(_HEADERS):
                return Site(file, number)
            node = self._field(node, "inlinedAt")
        return Site("?", 0)


def _as_floats(operands: list[str], kind: str, fresh) -> tuple[list[str], list[str]]:
    """Code that widens the operands to float, and the widened operands."""
    if kind == "float":
        return [], operands
    names = [fresh() for _ in operands]
    return [f"  {n} = fpext half {o} to float" for n, o in zip(names, operands, strict=True)], names


def _float_hook(result: str, kind: str, operands: list[str], ops: int, site: int, fresh):
    if kind.startswith("<"):
        lanes = int(re.match(r"<(\d+)", kind)[1])
        return [f"  call void @simt_count(i32 {ops * lanes})"]
    code, values = _as_floats([result, *operands], kind, fresh)
    values = [values[0], *(values[1:] * 3)[:3]]
    arguments = ", ".join(f"float {v}" for v in values)
    return [*code, f"  call void @simt_float({arguments}, i32 {site}, i32 {ops})"]


def instrument(ir: str) -> tuple[str, list[Site]]:
    """The module with the checker's calls, and the sites that the calls name by index.

    Raises NotImplementedError for a memory access of a form that it does not know.
    """
    metadata, sites, out = _Metadata(ir), [], []
    counter = iter(range(1 << 40))

    def fresh() -> str:
        return f"%simt.{next(counter)}"

    def here(line: str) -> int:
        sites.append(metadata.site(line))
        return len(sites) - 1

    for line in ir.split("\n"):
        before, after = [], []
        if metadata.site(line).file == ENTRY_FILE:
            pass  # the executor's own table of buffers
        elif found := _LOAD.match(line):
            if "@simt_state" not in found[3]:
                hook = "simt_atomic" if found[1] else "simt_load"
                before.append(
                    f"  call void @{hook}(ptr {found[3]}, i64 {_size(found[2])}, i32 {here(line)})"
                )
        elif found := _STORE.match(line):
            if "@simt_state" not in found[3]:
                arguments = f"(ptr {found[3]}, i64 {_size(found[2])}, i32 {here(line)})"
                if found[1]:
                    before.append(f"  call void @simt_atomic_store{arguments}")
                else:
                    before.append(f"  call void @simt_store{arguments}")
                    after.append(f"  call void @simt_stored{arguments}")
        elif found := _COPY.match(line):
            to, source, size = _arguments(found[2])[:3]
            site = here(line)
            if found[1] != "set":
                before.append(f"  call void @simt_load(ptr {source}, i64 {size}, i32 {site})")
            before.append(f"  call void @simt_store(ptr {to}, i64 {size}, i32 {site})")
            after.append(f"  call void @simt_stored(ptr {to}, i64 {size}, i32 {site})")
        elif found := _OPERATION.match(line):
            after += _float_hook(found[1], found[2], [found[3], found[4]], 1, here(line), fresh)
        elif found := _CALL.match(line):
            ops = 2 if found[3] in ("fma", "fmuladd") else 1
            operands = _arguments(found[4])
            after += _float_hook(found[1], found[2], operands, ops, here(line), fresh)
        elif _DOUBLE.match(line):
            raise NotImplementedError(
                f"double arithmetic, which MSL lacks, at {metadata.site(line)}"
            )
        elif _ACCESS.match(line):
            raise NotImplementedError(f"the checker does not know this instruction: {line.strip()}")
        out += [*before, line, *after]
    return "\n".join(out) + _DECLARATIONS, sites
