"""Refuses Metal text that Apple's compiler would refuse, on a machine without one.

The text is read as C++ for OpenCL, which has Metal's address spaces, by the clang of the ziglang
package, after `strict.h`, which has Metal's types, functions and conversions. What that clang
allows and Metal does not is found in its syntax tree, in its IR and in the tokens. A development
tool: nothing here runs on a user's machine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .backends import using
from .tokens import Token, closing, join, split, tokenize

THREADGROUP_BYTES = 32768
BUFFERS = 31
_FORBIDDEN = {
    "asm", "catch", "delete", "double", "dynamic_cast", "goto", "new", "throw", "try", "typeid",
    "virtual",
}  # fmt: skip
_FLAGS = [
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant",
    "--target=spir64", "-O0", "-w", "-fno-caret-diagnostics", "-fno-color-diagnostics",
]  # fmt: skip
_MARKER = "struct lily_text_begins;"


def metal_texts(call: Callable[..., Any], *arrays: Any) -> list[str]:
    """The Metal texts that MLX compiles for the kernels of `call(*arrays)`, on any machine.

    Arguments that are no arrays are passed as they are. Not safe with other threads: it catches
    what MLX prints.
    """
    at = [i for i, value in enumerate(arrays) if isinstance(value, mx.array)]

    def traced(*values: mx.array) -> Any:
        full = list(arrays)
        for i, value in zip(at, values, strict=True):
            full[i] = value
        return call(*full)

    sys.stdout.flush()
    with tempfile.TemporaryFile() as printed, using("metal", verbose=True):
        stdout = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(os.devnull, traced, *(arrays[i] for i in at))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        printed.seek(0)
        text = printed.read().decode()
    return re.findall(r"^Generated source code for `[^\n]*`:\n```\n(.*?)\n```$", text, re.M | re.S)


@functools.cache
def refusals(text: str) -> tuple[str, ...]:
    """Why Apple's compiler would refuse a text of `metal_texts`, a line each; empty if it passes.

    Raises: RuntimeError if the ziglang package is not installed.
    """
    tokens = list(tokenize(text, "text"))
    kernel = next(
        i for i in range(len(tokens)) if [t.text for t in tokens[i : i + 3]] == ["[", "[", "kernel"]
    )
    found = list(_lint(tokens, kernel))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.cl"
        path.write_text(_as_opencl(tokens, kernel))
        ir, errors = _clang(path, "-S", "-emit-llvm", "-o", "-")
        if errors:
            return tuple(found + errors)
        tree, _ = _clang(path, "-fsyntax-only", "-Xclang", "-ast-dump")
    return (*found, *_check_ir(ir), *_check_tree(tree))


def _clang(path: Path, *flags: str) -> tuple[str, list[str]]:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the strict check needs a clang: pip install ziglang")
    zig = Path(spec.submodule_search_locations[0]) / "zig"
    header = Path(__file__).parent / "strict.h"
    done = subprocess.run(
        [zig, "clang", *_FLAGS, "-include", header, *flags, path], capture_output=True, text=True
    )
    lines = path.read_text().splitlines()
    errors = []
    for line in done.stderr.splitlines():
        if where := re.match(rf"{re.escape(str(path))}:(\d+):(\d+): (?:fatal )?error: (.*)", line):
            at, column = int(where[1]) - 1, int(where[2]) - 1
            near = lines[at][max(0, column - 30) : column + 30] if at < len(lines) else ""
            errors.append(f"{where[3]} near `{near.strip()}`")
    if done.returncode and not errors:
        errors = [done.stderr.strip() or f"clang failed ({done.returncode})"]
    return done.stdout, errors


def _as_opencl(tokens: list[Token], kernel: int) -> str:
    """The text with its kernel an OpenCL one: no template, each buffer a pointer to bytes."""
    texts = [t.text for t in tokens]
    at = kernel + 5  # void NAME (
    name = texts[at + 1]
    end = closing(tokens, at + 2)
    body_end = closing(tokens, end + 1)
    params, locals_ = [], []
    for i, param in enumerate(split(tokens[at + 3 : end])):
        declared = param[: next(j for j, t in enumerate(param) if t.text == "[")]
        words = [t.text for t in declared]
        space = next((w for w in words if w in ("device", "constant")), None)
        if space is None:
            params.append(join(declared))
            continue
        pointer, target = f"buffer_{i}", join(declared[:-1]).replace("&", "*")
        params.append(f"{'const ' if 'const' in words else ''}{space} uchar* {pointer}")
        if "&" in words:
            locals_.append(f"{join(declared)} = *({target}){pointer};")
        else:
            locals_.append(f"{join(declared)} = ({target}){pointer};")
    start = kernel
    if texts[kernel - 1 : kernel] == [">"] and "template" in texts[:kernel]:
        start = max(i for i in range(kernel) if texts[i] == "template")
        # The instantiation at the end: ... NAME < value , value > ;
        first = len(texts) - 1 - texts[::-1].index(name) + 2
        values = split(tokens[first:-2])
        for declared, value in zip(split(tokens[start + 2 : kernel - 1]), values, strict=True):
            kind, parameter = declared[0].text, declared[1].text
            if kind == "typename":
                locals_.append(f"using {parameter} = {join(value)};")
            else:
                locals_.append(f"constexpr {kind} {parameter} = {join(value)};")
    header, body = join(tokens[:start]), join(tokens[end + 2 : body_end])
    return (
        f"{_MARKER}\n{header}\nkernel void {name}({', '.join(params)}) {{\n"
        f"{' '.join(locals_)}\n{body}\n}}\n"
    )


def _lint(tokens: list[Token], kernel: int) -> Iterator[str]:
    """What tokens alone show."""
    depth = 0
    for i, token in enumerate(tokens):
        if token.text in "({":
            depth += 1
        elif token.text in ")}":
            depth -= 1
        elif token.kind == "word" and token.text in _FORBIDDEN:
            yield f"Metal has no {token.text}"
        elif token.text == "static" and depth and tokens[i + 1].text != "constexpr":
            yield f"a local may not be static: {join(tokens[i : i + 4])}"
    buffers = sum(t.text == "buffer" and tokens[i + 1].text == "(" for i, t in enumerate(tokens))
    if buffers > BUFFERS:
        yield f"{buffers} buffers, Metal has {BUFFERS}"


def _check_ir(ir: str) -> Iterator[str]:
    """Threadgroup memory and recursion."""
    structs = dict(re.findall(r"^(%[\w.:\"<>, ]+?) = type (.*)$", ir, re.M))
    shared = re.findall(r"^@\S+ = .*?addrspace\(3\) global (.*?) undef", ir, re.M)
    total = sum(_bytes(kind, structs) for kind in shared)
    if total > THREADGROUP_BYTES:
        yield f"{total} bytes of threadgroup memory, Metal has {THREADGROUP_BYTES}"
    calls: dict[str, set[str]] = {}
    for define, body in re.findall(r"^define [^@]*@(\w+)\(.*?\{\n(.*?)^\}", ir, re.M | re.S):
        calls[define] = set(re.findall(r"\bcall [^@\n]*@(\w+)\(", body))
    for name in calls:
        if name in _reached(calls, name):
            yield f"{name} calls itself; Metal has no recursion"


def _reached(calls: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = set(calls[start])
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= calls.get(name, set()) - seen
    return seen


def _bytes(kind: str, structs: dict[str, str]) -> int:
    """Size of an LLVM type; a struct as the sum of its fields, without padding."""
    kind = kind.strip()
    if array := re.fullmatch(r"[\[<](\d+) x (.*)[\]>]", kind):
        count = int(array[1])
        if kind[0] == "<" and count == 3:
            count = 4  # vectors of three take the room of four
        return count * _bytes(array[2], structs)
    if kind in structs:
        return _bytes(structs[kind], structs)
    if kind.startswith("{"):
        return sum(_bytes(part, structs) for part in _fields(kind[1:-1]))
    sizes = {"half": 2, "bfloat": 2, "float": 4, "ptr": 8}
    if integer := re.fullmatch(r"i(\d+)", kind):
        return max(1, int(integer[1]) // 8)
    return sizes[kind.split()[0]]


def _fields(text: str) -> list[str]:
    depth, out = 0, [""]
    for c in text:
        depth += (c in "[<{") - (c in "]>}")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


def _check_tree(tree: str) -> Iterator[str]:
    """Pointers without an address space, casts that lose one, and variables at program scope."""
    parents: list[tuple[int, str]] = []
    began = False
    for line in tree.splitlines():
        node = re.match(r"([ |`-]*)(\w+) 0x\w+ (.*)", line)
        if not node:
            continue
        depth, kind, rest = len(node[1]), node[2], node[3]
        began = began or "lily_text_begins" in rest
        while parents and parents[-1][0] >= depth:
            parents.pop()
        if began:
            implicit = any(" implicit " in f" {text} " for _, text in parents) or re.search(
                r"\bimplicit\b", rest.split("'")[0]
            )
            if not implicit:
                yield from _check_node(kind, rest, parents[-1][1] if parents else "")
        parents.append((depth, f"{kind} {rest.split(chr(39))[0]}"))


def _check_node(kind: str, rest: str, parent: str) -> Iterator[str]:
    typed = re.search(r"([~\w]+)? ?'([^']*)'", rest)
    if not typed:
        return
    name, declared = typed[1] or "", typed[2]
    generic = "__generic" in declared
    if kind in ("VarDecl", "ParmVarDecl", "FieldDecl") and generic:
        yield f"{name or 'a parameter'} is a pointer or reference without an address space"
    elif kind in ("FunctionDecl", "CXXMethodDecl") and "__generic" in declared.split("(")[0]:
        yield f"{name} returns a pointer or reference without an address space"
    elif kind.endswith("CastExpr") and kind != "ImplicitCastExpr" and generic:
        yield f"a cast to {declared.replace('__generic ', '')} loses the address space"
    elif kind == "VarDecl" and not parent.startswith("DeclStmt") and "__constant" not in declared:
        yield f"{name} at program scope must be constant"


def check(call: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """`refusals` of each kernel that `call(*args)` launches; at least one."""
    texts = metal_texts(call, *args)
    if not texts:
        raise RuntimeError("no kernel was launched")
    return [reason for text in texts for reason in refusals(text)]
