"""MSL text to C++ text: includes, threadgroup variables, function constants, the entry point."""

from __future__ import annotations

import re
from pathlib import Path

from .instrument import ENTRY_FILE
from .signature import ATTRIBUTES, Parameter, parameters

INCLUDE_DIR = Path(__file__).resolve().parent / "include"


def blank(text: str) -> str:
    """The text with comments and string literals replaced by spaces, at equal length."""

    def spaces(found: re.Match) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', spaces, text, flags=re.S)


def inline_includes(text: str, name: str, include_dirs: list[Path], seen: set[str] | None = None):
    """The text with each ``#include "..."`` replaced by its file, once, with #line marks.

    Headers of the executor win over those of ``include_dirs``. Angle includes stay.
    Raises FileNotFoundError for a quoted include that is in none of them.
    """
    seen = set() if seen is None else seen
    out = [f'#line 1 "{name}"']
    for number, line in enumerate(text.split("\n"), 1):
        found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not found:
            out.append("" if re.match(r"\s*#\s*pragma\s+(once|METAL)", line) else line)
            continue
        path = found[1]
        if path not in seen:
            seen.add(path)
            file = next(
                (d / path for d in [INCLUDE_DIR, *include_dirs] if (d / path).is_file()), None
            )
            if file is None:
                raise FileNotFoundError(f"{name}:{number}: no include directory has {path}")
            out.append(inline_includes(file.read_text(), path, include_dirs, seen))
        out.append(f'#line {number + 1} "{name}"')
    return "\n".join(out)


_DECLARATOR = r"(\w+)\s*((?:\[[^\[\]]*\]\s*)*)"


def _threadgroup_variables(text: str) -> str:
    """``threadgroup T x[n];`` becomes a static that all threads of the group share."""
    masked = blank(text)
    out, last = [], 0
    for found in re.finditer(r"\bthreadgroup\b", masked):
        end = masked.find(";", found.end())
        statement = masked[found.end() : end]
        bare = re.sub(r"\[[^\[\]]*\]", lambda m: "[" + "_" * (len(m[0]) - 2) + "]", statement)
        if end < 0 or re.search(r"[*&(){}=]", bare):
            continue
        declared = re.fullmatch(
            rf"(\s+.*?[\w>])\s+({_DECLARATOR}(?:,\s*{_DECLARATOR})*)\s*", statement, re.S
        )
        if not declared:
            continue
        kind = declared[1].strip()
        code = []
        for item in re.finditer(_DECLARATOR, declared[2]):
            name, dims = item[1], " ".join(item[2].split())
            code.append(
                f"typedef {kind} {name}_simt_t{dims}; static simt::Shared<{name}_simt_t> "
                f'{name}_simt_s; {name}_simt_t& {name} = *{name}_simt_s.get("{name}");'
            )
        out += [text[last : found.start()], " ".join(code), "\n" * statement.count("\n")]
        last = end + 1
    return "".join(out) + text[last:]


def _function_constants(text: str, values: dict[int, object]) -> str:
    """Function constants become constexpr: the given value, or zero and "not defined"."""
    pattern = (
        r"\bconstant\s+(?:const\s+)?(\w+)\s+(\w+)\s*"
        r"\[\[\s*function_constant\s*\(\s*(\d+)\s*\)\s*\]\]\s*;"
    )
    defined = {}

    def declare(found: re.Match) -> str:
        index = int(found[3])
        defined[found[2]] = index in values
        return f"static constexpr {found[1]} {found[2]} = {found[1]}({int(values.get(index, 0))});"

    text = re.sub(pattern, declare, text)
    return re.sub(
        r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)",
        lambda m: str(defined.get(m[1], False)).lower(),
        text,
    )


_LITERAL = re.compile(
    r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+(?=bf\b))(bf|[hH]|)(?![\w.])"
)


def _literals(text: str) -> str:
    """MSL's literals: float without a suffix, and the suffixes h and bf."""
    out, last = [], 0
    for found in _LITERAL.finditer(blank(text)):
        kind = {"": "", "bf": "bfloat", "h": "half"}[found[2].lower()]
        value = f"{found[1]}f"
        out += [text[last : found.start()], f"{kind}({value})" if kind else value]
        last = found.end()
    return "".join(out) + text[last:]


def _entry(expression: str, params: list[Parameter]) -> str:
    """The function that the scheduler calls on each thread's stack."""
    threadgroup_base = 1 + max((p.index for p in params if p.kind == "buffer"), default=-1)
    arguments = []
    for p in params:
        if p.kind == "attribute":
            value = ATTRIBUTES[p.attribute]
            arguments.append(f"simt::Attribute{{{value}}}")
        else:
            slot = p.index + (threadgroup_base if p.kind == "threadgroup" else 0)
            arguments.append(f"simt::{'Reference' if p.reference else 'Pointer'}{{b[{slot}]}}")
    return f"""
#line 1 "{ENTRY_FILE}"
extern "C" void simt_entry(void** b, const simt::State* s) {{
  {expression}({", ".join(arguments)});
}}
#if defined(__APPLE__)
extern "C" char __dso_handle;
#define simt_first __dso_handle
#define simt_last (&__dso_handle)[1 << 24]
#else
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
#define simt_first __ehdr_start
#define simt_last _end
#endif
extern "C" void simt_module(const void** range) {{
  range[0] = &simt_first;
  range[1] = &simt_last;
}}
"""


def translate(
    text: str,
    name: str,
    expression: str,
    include_dirs: list[Path],
    constants: dict[int, object],
) -> tuple[str, list[Parameter]]:
    """C++ for the kernel that ``expression`` names, and its parameters.

    ``expression`` is a kernel function of ``text`` with its template arguments, if any.
    """
    text = inline_includes(text, name, include_dirs)
    text = _literals(_function_constants(_threadgroup_variables(text), constants))
    kernel = re.split(r"\s*<", expression, maxsplit=1)[0].split("::")[-1]
    params = parameters(blank(text), kernel)
    # The only attribute that the address-space macros would break.
    text = re.sub(r"\[\[\s*threadgroup\s*\(\s*\d+\s*\)\s*\]\]", "", text)
    return "#include <metal_stdlib>\n" + text + _entry(expression, params), params
