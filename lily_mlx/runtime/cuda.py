"""The same Metal text under `mx.fast.cuda_kernel`, for MLX's CUDA build.

Address-space words vanish or become `__shared__`, literals become float as Metal's are, thread
attributes are computed at the head of the body, and `msl_cuda.h` gives CUDA the rest of Metal's
names. Not there: simdgroup matrices, tensor operations, quadgroups, assignment to a swizzle.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .source import ATTRIBUTES
from .tokens import Token, join, tokenize

HEADER = Path(__file__).parent / "msl_cuda.h"
_MISSING = re.compile(r"simdgroup_(\w*8x8|matrix|load|store|multiply\w*)|mpp|tensor_ops|quad_\w+")
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}
_COMPONENTS = {name: i for names in ("xyzw", "rgba") for i, name in enumerate(names)}
_DECIMAL = r"(?!0[xX])[\d.]+([eE][+-]?\d+)?"
_HEX_FLOAT = r"0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+"


class CudaError(ValueError):
    """A kernel uses something of Metal's that the translation has not."""


def translate(header: str, body: str, scalars: Sequence[str] = ()) -> tuple[str, str]:
    """Metal header and body as the `header` and `source` of `mx.fast.cuda_kernel`.

    `scalars` are 0-d inputs: values in Metal's text, pointers in CUDA's, where the input must be
    called `<name>_at`.
    Raises: CudaError if the text uses what is not there.
    """
    tokens = list(tokenize(body))
    words = {t.text for t in tokens}
    prologue = "".join(f"const auto {name}=*{name}_at;" for name in scalars)
    prologue += "".join(f"const auto {a}=get_{a}();" for a in ATTRIBUTES if a in words)
    head = f'#include "{HEADER}"\n'
    if header:
        head += f"namespace mlx::core::cu{{\n{join(_rewrite(list(tokenize(header))))}\n}}\n"
    return head, prologue + "\n" + join(_rewrite(tokens))


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
) -> Callable[..., list[mx.array]]:
    """`mx.fast.metal_kernel` on CUDA, for kernels that are not lily_mlx's, mlx_lm's own for one.

    The callable takes the same keywords; 0-d inputs are values in the text, as they are there.
    Whole threadgroups of whole simdgroups must be launched. Raises: CudaError.
    """

    @functools.cache
    def build(scalars: tuple[str, ...]) -> Callable[..., list[mx.array]]:
        head, body = translate(header, source, scalars)
        return mx.fast.cuda_kernel(
            name=name,
            input_names=[f"{n}_at" if n in scalars else n for n in input_names],
            output_names=list(output_names),
            source=body,
            header=head,
            ensure_row_contiguous=ensure_row_contiguous,
        )

    def call(*, inputs: Sequence[Any], **rest: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        scalars = tuple(n for n, x in zip(input_names, arrays, strict=True) if x.ndim == 0)
        return build(scalars)(inputs=arrays, **rest)

    return call


def _rewrite(tokens: list[Token]) -> list[Token]:
    out: list[Token] = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1].text if i else ""
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        text: str | None = token.text
        if token.kind == "directive":
            text = _directive(token.text)
        elif token.kind == "number":
            text = _literal(token.text)
        elif token.kind == "word":
            if _MISSING.fullmatch(text):
                raise CudaError(f"{text} has no CUDA translation")
            if text in ("device", "constant", "thread") or (text == "metal" and after == "::"):
                text = None
            elif text == "threadgroup":
                text = "__shared__" if _is_variable(tokens, i) else None
            elif before in (".", "->") and re.fullmatch(r"[xyzw]{2,4}|[rgba]{2,4}", text):
                if after in _ASSIGN:
                    raise CudaError(f"assignment to .{text} has no CUDA translation")
                text = f"template swizzle<{','.join(str(_COMPONENTS[c]) for c in text)}>()"
        elif text == "::" and before == "metal":
            text = None
        if text == token.text or token.kind == "directive":
            out.append(token._replace(text=text))
        elif text is not None:
            out += tokenize(text)
    return out


def _is_variable(tokens: list[Token], at: int) -> bool:
    """Whether `threadgroup` at `at` declares memory, not a pointer or reference to it."""
    for token in tokens[at + 1 :]:
        if token.text in ("*", "&"):
            return False
        if token.text in ("[", ";", "=", ")"):
            return True
    return True


def _literal(text: str) -> str:
    """A number as Metal reads it: float unless it says half."""
    if re.fullmatch(f"{_DECIMAL}|{_HEX_FLOAT}", text):
        return text if text.isdigit() else text + "f"
    if re.fullmatch(f"{_DECIMAL}[hH]", text):
        return f"half({text[:-1]}f)" if re.search(r"[.eE]", text) else f"half({text[:-1]})"
    if text.endswith(("bf", "BF")) and not text.startswith(("0x", "0X")):
        raise CudaError(f"the literal {text} has no CUDA translation; write bfloat(...)")
    return text


def _directive(text: str) -> str:
    if text.startswith("#include"):
        raise CudaError(f"{text} has no CUDA translation")
    if define := re.fullmatch(r"#define (\w+(?:\([^)]*\))?) ?(.*)", text):
        return f"#define {define[1]} {join(_rewrite(list(tokenize(define[2]))))}"
    return text
