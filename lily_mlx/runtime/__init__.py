"""From kernel text to a callable that is checked before it is trusted."""

from .backends import backend, kernel, scalar
from .guard import Op, op

__all__ = ["Op", "backend", "kernel", "op", "scalar"]
