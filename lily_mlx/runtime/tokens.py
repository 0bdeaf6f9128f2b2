"""Metal text as tokens: what the loader, the CUDA translation and the strict check work on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Multi-character operators first, so that each is one token and never merges with a neighbour.
_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
  | (?P<directive>\#(?:\\\n|/\*.*?\*/|(?!//|/\*)[^\n])*)
  | (?P<space>\s+|\\\n)
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<mark><<=|>>=|\.\.\.|->\*|\#\#|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
OPEN, CLOSE = "([{", ")]}"


class Token(NamedTuple):
    """A token of Metal text and where it stands. `kind` is a group name of the pattern."""

    kind: str
    text: str
    line: int
    file: str = ""


def tokenize(text: str, file: str = "") -> Iterator[Token]:
    """The tokens of `text` without comments and blanks; a preprocessor line is one token."""
    line, fresh, at = 1, True, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind = match.lastgroup
        if kind == "directive" and not fresh:  # a stray '#' inside a line
            match = re.compile("##?").match(text, at)
            kind = "mark"
        value = match.group()
        if kind == "directive":
            value = re.sub(r"\\\n|/\*.*?\*/", " ", value, flags=re.DOTALL)
            value = re.sub(r"\s+", " ", value).replace("# ", "#").strip()
        if kind not in ("comment", "space"):
            yield Token(kind, value, line, file)
        newlines = match.group().count("\n")
        line += newlines
        if kind == "space":
            fresh = fresh or newlines > 0
        elif kind != "comment":
            fresh = False
        elif newlines or match.group().startswith("//"):
            fresh = True
        at = match.end()


def _first(text: str) -> str:
    return _TOKEN.match(text).group()


def join(tokens: Iterable[Token]) -> str:
    """The shortest text with these tokens: a blank only where two would become one."""
    out: list[str] = []
    before: Token | None = None
    for token in tokens:
        if before is not None:
            if "directive" in (before.kind, token.kind):
                out.append("\n")
            elif before.text[-1].isalnum() or before.text[-1] == "_":
                word = token.text[0].isalnum() or token.text[0] in "_\"'"
                if word or (
                    before.kind == "number" and _first(before.text + token.text[0]) != before.text
                ):
                    out.append(" ")
            elif before.text == "/" and token.text[0] in "*/":
                out.append(" ")  # a comment would begin
            elif _first(before.text + token.text) != before.text:
                out.append(" ")
        out.append(token.text)
        before = token
    return "".join(out)


def join_lines(tokens: Iterable[Token]) -> str:
    """The same text with the lines of its files kept, for messages: `#line` where they jump."""
    out: list[str] = []
    at: tuple[str, int] | None = None
    for token in tokens:
        here = (token.file, token.line)
        if here == at:
            out.append(" ")
        elif at is not None and here == (at[0], at[1] + 1):
            out.append("\n")
        else:
            out.append(f'\n#line {token.line} "{token.file}"\n')
        out.append(token.text)
        at = here
    return "".join(out)


def closing(tokens: list[Token], start: int) -> int:
    """Index of the bracket that closes the one at `start`, or -1."""
    depth = 0
    for i in range(start, len(tokens)):
        if tokens[i].kind == "mark":
            if tokens[i].text in OPEN:
                depth += 1
            elif tokens[i].text in CLOSE:
                depth -= 1
                if depth == 0:
                    return i
    return -1


def split(tokens: list[Token], separator: str = ",") -> list[list[Token]]:
    """Split at a separator outside brackets and angle brackets; no empty parts."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "mark":
            if token.text in OPEN or token.text == "<":
                depth += 1
            elif token.text in CLOSE or token.text == ">":
                depth -= 1
            elif token.text == ">>":
                depth -= 2
        if token.text == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]
