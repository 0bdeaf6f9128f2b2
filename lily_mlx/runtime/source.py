"""Reads `metal_kernels/<name>.metal`, a whole Metal kernel, into what `mx.fast.metal_kernel` takes.

MLX writes the signature itself, so the loader takes the kernel's own apart: `const device` and
`constant` parameters are inputs, `device` ones outputs, the text before the kernel is the header
and its body the source. Comments and blanks go: MLX hashes the text at every call.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from .tokens import Token, closing, join, join_lines, split, tokenize

# Bytes of header and body, minified: MLX rebuilds and hashes that text at every call.
LIMIT, PREFILL_LIMIT = 4096, 12288
# MLX's names of the thread attributes, with the type it gives each.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
_STRIDED = re.compile(r"(\w+)_(shape|strides|ndim)")


class SourceError(ValueError):
    """A kernel file breaks a rule of the loader; the message names the file and line."""


@dataclass(frozen=True)
class Source:
    """A kernel file, taken apart.

    Attributes:
        name: the kernel's, the file's stem.
        doc: the comment at the file's head, its slashes removed.
        template: {template parameter: "typename" | "int" | "bool"}, visible in the body only.
        inputs, outputs: parameter names in order.
        header, body: minified text.
        debug_header, debug_body: the same tokens on the lines of their files, with `#line`.
        contiguous: whether MLX shall copy strided inputs, i.e. the kernel takes no `<x>_strides`.
    """

    name: str
    doc: str
    template: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    debug_header: str
    debug_body: str
    contiguous: bool

    @property
    def size(self) -> int:
        """Bytes of text that MLX hashes per call."""
        return len(self.header) + len(self.body)

    @property
    def limit(self) -> int:
        """The bytes this kernel may have: more if its head comment has a line `Use: prefill`."""
        return PREFILL_LIMIT if re.search(r"^Use: prefill\b", self.doc, re.M) else LIMIT


@functools.cache
def folder() -> Path:
    """Where the kernel files are: inside the package (a wheel), or at the repository's top."""
    package = Path(__file__).resolve().parents[1]
    for path in (package / "metal_kernels", package.parent / "metal_kernels"):
        if path.is_dir():
            return path
    raise SourceError(f"{package} has no metal_kernels folder; reinstall lily_mlx")


@functools.cache
def names() -> tuple[str, ...]:
    """Names of the kernels there are, sorted."""
    return tuple(sorted(path.stem for path in folder().glob("*.metal")))


@functools.cache
def load(name: str) -> Source:
    """Read the kernel called `name`.

    Raises: SourceError if there is no such kernel or its file cannot be used.
    """
    path = folder() / f"{name}.metal"
    if not path.is_file():
        raise SourceError(f"no kernel {name!r}; there are: {', '.join(names()) or 'none'}")
    return parse(path)


def parse(path: Path) -> Source:
    """Take the kernel file at `path` apart. Raises: SourceError."""
    text = path.read_text(encoding="utf-8")
    tokens = _include(path, path.parent, set())
    start = _find_kernel(tokens, path)
    template_at = _template_start(tokens, start)
    # tokens[start : start + 5] are [[kernel]]; then: void NAME ( parameters ) { body }
    at = start + 5
    if [t.text for t in tokens[at : at + 3 : 2]] != ["void", "("]:
        _fail(tokens[start], "[[kernel]] must be followed by: void name(")
    if tokens[at + 1].text != path.stem:
        _fail(tokens[at + 1], f"the kernel is called {tokens[at + 1].text}, its file {path.stem}")
    params_end = closing(tokens, at + 2)
    if params_end < 0 or tokens[params_end + 1 : params_end + 2] == []:
        _fail(tokens[at], "the parameter list does not end")
    brace = params_end + 1
    body_end = closing(tokens, brace) if tokens[brace].text == "{" else -1
    if body_end < 0:
        _fail(tokens[brace], "the kernel's body must follow its parameters and end with }")
    if body_end + 1 < len(tokens):
        _fail(tokens[body_end + 1], "nothing may follow the kernel; move this before it")

    params = _Parameters(split(tokens[at + 3 : params_end]))
    body = params.prologue + tokens[brace + 1 : body_end]
    params.check(body)
    header = tokens[:template_at]
    return Source(
        name=path.stem,
        doc=_head_comment(text),
        template=_template(tokens[template_at:start]),
        inputs=tuple(params.inputs),
        outputs=tuple(params.outputs),
        header=join(header) + "\n" if header else "",
        body=join(body),
        debug_header=join_lines(header) + "\n" if header else "",
        debug_body=join_lines(body),
        contiguous=not any(name.endswith("_strides") for name in params.layout),
    )


def _fail(token: Token, message: str) -> None:
    raise SourceError(f"{token.file}:{token.line}: {message}")


def _head_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.lstrip("/").strip())
    return "\n".join(lines)


def _include(path: Path, root: Path, seen: set[Path]) -> list[Token]:
    """The file's tokens with `#include "..."` replaced by that file, once each.

    What MLX's own preamble has already is dropped: <metal_...> headers and using namespace metal.
    """
    seen.add(path)
    out: list[Token] = []
    tokens = list(tokenize(path.read_text(encoding="utf-8"), str(path.relative_to(root.parent))))
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if [t.text for t in tokens[at : at + 4]] == ["using", "namespace", "metal", ";"]:
            at += 4
            continue
        at += 1
        if token.kind != "directive":
            out.append(token)
        elif include := re.fullmatch(r'#include ?"([^"]+)"', token.text):
            target = root / include[1]
            if not target.is_file():
                _fail(token, f"no file {include[1]} in {root.name}/")
            if target not in seen:
                out += _include(target, root, seen)
        elif not re.fullmatch(r"#pragma once|#include ?<metal_\w+>", token.text):
            out.append(token)
    return out


def _find_kernel(tokens: list[Token], path: Path) -> int:
    texts = [t.text for t in tokens]
    found = [i for i in range(len(texts) - 4) if texts[i : i + 5] == ["[", "[", "kernel", "]", "]"]]
    if len(found) != 1:
        line = tokens[found[1]].line if found else 1
        raise SourceError(
            f"{path.parent.name}/{path.name}:{line}: a file needs exactly one [[kernel]] function, "
            f"this has {len(found)}"
        )
    return found[0]


def _template_start(tokens: list[Token], start: int) -> int:
    """Index of the `template` that belongs to the kernel at `start`, or `start`."""
    if start == 0 or tokens[start - 1].text != ">":
        return start
    at = start - 1
    while at >= 0 and tokens[at].text != "template":
        if tokens[at].text in (";", "}"):
            _fail(tokens[start], "cannot read what stands before [[kernel]]")
        at -= 1
    return at


def _template(tokens: list[Token]) -> dict[str, str]:
    out = {}
    for part in split(tokens[2:-1]):
        texts = [t.text for t in part]
        kind = "typename" if texts[0] == "class" else texts[0]
        if len(texts) != 2 or kind not in ("typename", "int", "bool"):
            _fail(part[0], "a template parameter must be typename, int or bool, with no default")
        out[texts[1]] = kind
    return out


class _Parameters:
    """The kernel's parameter list, sorted into what MLX does with each."""

    def __init__(self, params: list[list[Token]]):
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.layout: list[str] = []
        self.prologue: list[Token] = []
        self.names: dict[str, Token] = {}
        for param in params:
            self._add(param)
        if not self.inputs or not self.outputs:
            _fail(params[0][0], "a kernel needs an input and an output")

    def _add(self, param: list[Token]) -> None:
        texts = [t.text for t in param]
        at = next((i for i, t in enumerate(texts) if t == "[" and texts[i : i + 2] == ["["] * 2), 0)
        if at < 2 or texts[-2:] != ["]", "]"]:  # at - 1 is the name, at - 2 its type
            _fail(param[0], "a parameter must end with its [[attribute]]")
        name, attribute = param[at - 1], texts[at + 2]
        declared = texts[: at - 1]
        self.names[name.text] = name
        if attribute in ATTRIBUTES:
            self._attribute(name, attribute, declared)
        elif attribute != "buffer":
            _fail(name, f"[[{attribute}]] is not an attribute MLX can give")
        elif (layout := _STRIDED.fullmatch(name.text)) and layout[1] in self.inputs:
            self.layout.append(name.text)
        elif declared[-1] != "*":
            _fail(name, f"{name.text} must be a pointer; pass a scalar as an array of one element")
        elif "constant" in declared or ("device" in declared and "const" in declared):
            if self.outputs:
                _fail(name, f"input {name.text} must come before the outputs")
            self.inputs.append(name.text)
        elif "device" in declared:
            if any(word.startswith("atomic") for word in declared):
                _fail(name, "atomic outputs are not supported")
            self.outputs.append(name.text)
        else:
            _fail(name, f"{name.text} must be const device, constant (inputs) or device (outputs)")

    def _attribute(self, name: Token, attribute: str, declared: list[str]) -> None:
        """MLX names the parameter as the attribute; keep the kernel's name and type for it."""
        given = ATTRIBUTES[attribute]
        swizzle = {"uint": ".x", "ushort": ".x", "uint2": ".xy"}.get(declared[0], "")
        if len(declared) != 1 or (given == "uint" and declared[0] not in ("uint", "ushort")):
            _fail(name, f"{attribute} must be declared {given} {name.text}")
        if name.text != attribute or declared[0] != given:
            if name.text == attribute:
                _fail(name, f"{attribute} is {given}; use another name for a part of it")
            text = f"{declared[0]} {name.text} = {attribute}{swizzle if given == 'uint3' else ''};"
            self.prologue += [t._replace(line=name.line) for t in tokenize(text, name.file)]

    def check(self, body: list[Token]) -> None:
        """MLX looks for `<input>_shape` and so on anywhere in the text: no accidental ones."""
        for token in body:
            for found in _STRIDED.finditer(token.text) if token.kind == "word" else ():
                accidental = any(found[1].endswith(x) for x in self.inputs)
                if accidental and token.text not in self.layout:
                    _fail(
                        token,
                        f"MLX takes {token.text} for the {found[2]} of an input; rename it, or "
                        f"declare it as a parameter",
                    )
