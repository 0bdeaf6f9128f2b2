"""The MSL that MLX generates for a custom kernel, and what a kernel's parameter list asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx

# Taken at import: a test may later put this executor in mx.fast.metal_kernel's place.
mlx_metal_kernel = mx.fast.metal_kernel

ATTRIBUTES = {
    "thread_position_in_grid": "s->thread_position_in_grid",
    "thread_position_in_threadgroup": "s->thread_position_in_threadgroup",
    "threadgroup_position_in_grid": "s->threadgroup_position_in_grid",
    "threads_per_grid": "s->threads_per_grid",
    "threads_per_threadgroup": "s->threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "s->dispatch_threads_per_threadgroup",
    "threadgroups_per_grid": "s->threadgroups_per_grid",
    "thread_index_in_threadgroup": "{s->index}",
    "thread_index_in_simdgroup": "{s->lane}",
    "simdgroup_index_in_threadgroup": "{s->simdgroup_index}",
    "simdgroups_per_threadgroup": "{s->simdgroups}",
    "dispatch_simdgroups_per_threadgroup": "{s->simdgroups}",
    "threads_per_simdgroup": "{32}",
    "thread_execution_width": "{32}",
    "quadgroup_index_in_threadgroup": "{s->index / 4}",
    "quadgroups_per_threadgroup": "{(s->simdgroups * 32) / 4}",
    "thread_index_in_quadgroup": "{s->index % 4}",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: its name in the text.
        kind: "buffer", "threadgroup" or "attribute".
        index: the buffer or threadgroup index, else -1.
        reference: declared with ``&``.
        attribute: MSL's name of the attribute.
        optional: a function constant may turn the buffer off.
    """

    name: str
    kind: str
    index: int = -1
    reference: bool = False
    attribute: str = ""
    optional: bool = False


def mlx_text(kernel, arrays: list[mx.array], call: dict) -> str:
    """The MSL that MLX would compile for this call, from MLX itself (any platform).

    ``kernel`` is what ``mx.fast.metal_kernel`` returned and ``call`` its keyword arguments
    without ``inputs``. Raises what MLX raises for arguments that do not fit the kernel.
    """
    primitives = []

    def keep(entry):
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            primitives.append(entry)

    mx.export_function(keep, lambda *traced: kernel(inputs=list(traced), **call), *arrays)
    if len(primitives) != 1:
        raise RuntimeError(
            f"MLX {mx.__version__} exported {len(primitives)} custom kernels for one call; "
            "the executor knows MLX 0.32's exports"
        )
    return next(a for a in primitives[0]["arguments"] if isinstance(a, str) and "[[kernel]]" in a)


def instantiation(text: str) -> tuple[str, str]:
    """MLX's text without its explicit instantiation, and the expression it instantiates."""
    found = re.search(
        r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*)\) .*;\n", text
    )
    if found:
        return text[: found.start()], found[1]
    name = re.search(r"\[\[kernel\]\]\s+void\s+(\w+)", text)
    if not name:
        raise ValueError("the text has no [[kernel]] function")
    return text, name[1]


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError("unbalanced parentheses in a kernel's parameter list")


def _split(text: str) -> list[str]:
    """Splits at the commas outside brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [p for p in (*parts, text[last:]) if p.strip()]


def parameters(text: str, kernel: str) -> list[Parameter]:
    """The parameter list of ``kernel`` (comments and strings already blanked in ``text``).

    Raises ValueError if the kernel is not there or a parameter has no known attribute.
    """
    pattern = r"(?:\[\[\s*kernel[^\]]*\]\]|\bkernel\b)\s*(?:\[\[[^\]]*\]\]\s*)?void\s+(\w+)\s*\("
    for found in re.finditer(pattern, text):
        if found[1] == kernel:
            break
    else:
        raise ValueError(f"the text has no kernel named {kernel!r}")
    start = found.end() - 1
    result = []
    for part in _split(text[start + 1 : _closing(text, start)]):
        attributes = " ".join(re.findall(r"\[\[(.*?)\]\]", part, re.S))
        declared = re.sub(r"\[\[.*?\]\]", "", part, flags=re.S).split("=")[0].strip()
        name = re.search(r"(\w+)\s*(?:\[[^\]]*\])?$", declared)
        place = re.search(r"\b(buffer|threadgroup)\s*\(\s*(\d+)\s*\)", attributes)
        if name and place:
            optional = "function_constant" in attributes
            index = int(place[2])
            result.append(Parameter(name[1], place[1], index, "&" in declared, optional=optional))
            continue
        if name and not attributes and re.search(r"[*&]", declared):
            # Metal numbers the buffers itself, in order.
            used = {p.index for p in result if p.kind == "buffer"}
            index = next(i for i in range(len(used) + 1) if i not in used)
            result.append(Parameter(name[1], "buffer", index, "&" in declared))
            continue
        word = re.match(r"\s*(\w+)", attributes)
        if not name or not word or word[1] not in ATTRIBUTES:
            raise ValueError(
                f"kernel {kernel}: the executor cannot bind the parameter {part.strip()!r}"
            )
        result.append(Parameter(name[1], "attribute", attribute=word[1]))
    return result
