"""Ops: a kernel launch, its MLX reference, and the check that decides between the two.

An op's first call for each variant (dtype, bits, group size, static sizes: whatever changes the
compiled text) compiles the kernel and compares it with the reference on a small random case. A
kernel that cannot compile, raises or disagrees is off for that variant in this process: one line
says so on stderr, and the op is its reference from then on.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx

from . import source
from .backends import backend

Variant = tuple[Hashable, ...]

_registry: dict[str, Op] = {}
# One at a time, so that two threads' first calls check once; re-entrant, as a reference may use
# another op.
_lock = threading.RLock()


@dataclass(frozen=True)
class State:
    """What became of one variant of an op.

    Attributes:
        variant: as the op's `variant` function gives it.
        ok: whether its kernel runs.
        reason: why it does not, else "".
    """

    variant: Variant
    ok: bool
    reason: str


class Op:
    """A function with a kernel behind it and plain MLX beside it; `@op(...)` makes it.

    Attributes:
        name: the function's, and of the kernel unless `kernels` says otherwise.
        kernels: names of the kernel files that one call launches.
        launch: the decorated function: always the kernel.
        reference: the same result in plain MLX, rounded where MLX-LM rounds; same arguments.
        variant: function of the arguments; a tuple of all that changes the compiled text, or
            None where the kernel does not serve these arguments: then the reference does.
        inputs: `inputs(key, *variant, **sizes)`, random arguments of a variant, small by default.
        bytes: function of the arguments; bytes that must move, the roofline's numerator.
    """

    def __init__(
        self,
        launch: Callable[..., Any],
        reference: Callable[..., Any],
        variant: Callable[..., Variant | None],
        inputs: Callable[..., tuple[Any, ...]],
        bytes: Callable[..., int],
        kernels: tuple[str, ...] = (),
    ):
        functools.update_wrapper(self, launch)
        self.name = launch.__name__
        self.kernels = kernels or (self.name,)
        self.launch = launch
        self.reference = reference
        self.variant = variant
        self.inputs = inputs
        self.bytes = bytes
        self._usable: dict[Variant | None, bool] = {None: False}
        self._states: dict[Variant, State] = {}
        _registry[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        variant = self.variant(*args, **kwargs)
        usable = self._usable.get(variant)
        if usable is None:
            usable = self._first_use(variant)
        return (self.launch if usable else self.reference)(*args, **kwargs)

    def usable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a call with these arguments runs the kernel; checks it if that is not known.

        For a layer whose stock path is faster than the reference of its parts.
        """
        variant = self.variant(*args, **kwargs)
        usable = self._usable.get(variant)
        return self._first_use(variant) if usable is None else usable

    def _first_use(self, variant: Variant) -> bool:
        with _lock:
            if variant not in self._usable:
                reason = self._why_not(variant)
                self._states[variant] = State(variant, reason is None, reason or "")
                self._usable[variant] = reason is None
            return self._usable[variant]

    def _why_not(self, variant: Variant) -> str | None:
        """Why the kernel must not run, or None. Says so on stderr unless it was asked for."""
        if backend() == "reference":
            return "reference backend"
        if not disabled().isdisjoint(self.kernels):
            return "LILY_DISABLE"
        try:
            # Concrete arrays from an explicit key: eager, whatever trace this call is part of.
            reason = self.check(*self.inputs(mx.random.key(0), *variant))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            reason = " ".join(reason.split())
            named = ", ".join(map(describe, variant))
            short = reason if len(reason) <= 300 else f"{reason[:240]} ... {reason[-55:]}"
            versions = f"lily_mlx {_version('lily-mlx')}, mlx {mx.__version__}"
            print(
                f"lily_mlx: {self.name} ({named}) is off, MLX runs in its place: {short} "
                f"[{versions}, {backend()}]",
                file=sys.stderr,
                flush=True,
            )
        return reason

    def check(self, *args: Any) -> str | None:
        """Run the kernel and the reference on `args`; how they disagree, or None.

        Both are measured against the reference in fp32. The kernel may be as far from that as
        twice the reference is, or as four roundings to the dtype and 128 to fp32 of the largest
        element: more than another order of sums makes, and far less than a wrong index or a
        lost barrier. Integer results must be equal.
        """
        got = as_list(self.launch(*args))
        want = as_list(self.reference(*args))
        exact = as_list(self.reference(*map(to_fp32, args)))
        mx.eval(got, want, exact)
        if len(got) != len(want):
            return f"{len(got)} outputs, not {len(want)}"
        for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
            if (g.shape, g.dtype) != (w.shape, w.dtype):
                return f"output {i} is {describe(g)}, not {describe(w)}"
            if not mx.issubdtype(g.dtype, mx.floating):
                if not mx.array_equal(g, w).item():
                    return f"output {i} differs from MLX"
                continue
            g, w, e = (a.astype(mx.float32) for a in (g, w, e))
            roundings = 2 * float(mx.finfo(want[i].dtype).eps) + 2**-17  # each is eps / 2
            allowed = max(2 * mx.abs(w - e).max().item(), roundings * mx.abs(e).max().item())
            error = mx.abs(g - e).max().item()
            if not error <= allowed:  # a NaN is no error below anything
                return f"output {i} is off by {error:.3g}, allowed {allowed:.3g}"
        return None

    def states(self) -> list[State]:
        """What is known of each variant used so far."""
        with _lock:
            return list(self._states.values())

    def forget(self) -> None:
        """Check again at the next call; for tests, which change the backend."""
        with _lock:
            self._usable = {None: False}
            self._states.clear()


def op(
    *,
    reference: Callable[..., Any],
    variant: Callable[..., Variant | None],
    inputs: Callable[..., tuple[Any, ...]],
    bytes: Callable[..., int],
    kernels: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Op]:
    """Make an `Op` of the function that launches its kernel; see there for the arguments."""

    def make(launch: Callable[..., Any]) -> Op:
        return Op(launch, reference, variant, inputs, bytes, kernels)

    return make


@functools.cache
def disabled() -> frozenset[str]:
    """Kernels that LILY_DISABLE turns off; names that are no kernel's get one line on stderr."""
    asked = {name.strip() for name in os.environ.get("LILY_DISABLE", "").split(",")} - {""}
    if unknown := sorted(asked - set(source.names())):
        print(
            f"lily_mlx: LILY_DISABLE: no kernel {', '.join(unknown)}; "
            f"there are {', '.join(source.names())}",
            file=sys.stderr,
        )
    return frozenset(asked)


@dataclass(frozen=True)
class Row:
    """A line of `table()`: an op and "ok", "disabled" or "not used yet", with what is known."""

    op: str
    state: str
    detail: str


def table() -> list[Row]:
    """The state of each op that has been imported, by name."""
    rows = []
    for name, each in sorted(_registry.items()):
        states = each.states()
        off = [s for s in states if not s.ok]
        if "LILY_DISABLE" in {s.reason for s in off} or not disabled().isdisjoint(each.kernels):
            rows.append(Row(name, "disabled", "LILY_DISABLE"))
        elif off:
            reasons = (f"{', '.join(map(describe, s.variant))}: {s.reason}" for s in off)
            rows.append(Row(name, "disabled", "; ".join(reasons)))
        elif states:
            kinds = (", ".join(map(describe, s.variant)) for s in states)
            rows.append(Row(name, "ok", "; ".join(kinds)))
        else:
            rows.append(Row(name, "not used yet", ""))
    return rows


def as_list(result: Any) -> list[mx.array]:
    """An op's result, one array or several, as a list."""
    return [result] if isinstance(result, mx.array) else list(result)


def to_fp32(value: Any) -> Any:
    """Floating arrays as fp32, anything else as it is."""
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(mx.float32)
    return value


def describe(value: Any) -> str:
    """A part of a variant, or an array, in a few characters."""
    if isinstance(value, mx.array):
        return f"{describe(value.dtype)}{list(value.shape)}"
    return str(value).removeprefix("mlx.core.")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
