"""What chip this is, and the launch geometry each kernel takes on it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx


@dataclass(frozen=True)
class Chip:
    """A device that MLX runs on.

    Attributes:
        name: as the driver says it, e.g. "Apple M5 Max".
        family: "m1" to "m5" and on, "h200" and so on, "nvidia" or "apple" if unknown, or "cpu".
        tier: "pro", "max", "ultra" or "", of Apple's.
        architecture: MLX's word for it, e.g. "applegpu_g17s" or "sm_90".
        memory: bytes, 0 if not known.
    """

    name: str
    family: str
    tier: str
    architecture: str
    memory: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Names to look this chip up by in a table, the most exact first."""
        vendor = {"cpu": "cpu", "m": "apple", "apple": "apple"}.get(
            re.match(r"cpu|apple|m(?=\d)|", self.family).group(), "nvidia"
        )
        exact = f"{self.family} {self.tier}".strip()
        return tuple(dict.fromkeys((exact, self.family, vendor, "default")))


@functools.cache
def chip() -> Chip:
    """The chip of MLX's GPU if there is one, else the CPU."""
    gpu = mx.metal.is_available() or mx.cuda.is_available()
    info = mx.device_info(mx.gpu) if gpu else mx.device_info(mx.cpu)
    return identify(info, "cuda" if mx.cuda.is_available() else "metal" if gpu else "cpu")


def identify(info: Mapping[str, object], platform: str) -> Chip:
    """The chip of `mx.device_info()` on a platform: "metal", "cuda" or "cpu"."""
    name = str(info.get("device_name", platform))
    memory = int(info.get("memory_size", info.get("total_memory", 0)) or 0)
    family, tier = "cpu", ""
    if platform == "metal":
        found = re.search(r"\bM(\d+)(?: (Pro|Max|Ultra))?\b", name)
        family = f"m{found[1]}" if found else "apple"
        tier = (found[2] or "").lower() if found else ""
    elif platform == "cuda":
        found = re.search(r"\b([ABHL]\d+|GB?\d+|RTX \w+)\b", name)
        family = found[1].lower() if found else "nvidia"
    return Chip(name, family, tier, str(info.get("architecture", "")), memory)


# {kernel: {chip: {parameter: value}}}; a chip's values are laid over the default's.
TUNING: dict[str, dict[str, dict[str, int]]] = {
    # rows: simdgroups of a threadgroup, one row each. At decode 32 rows are all there are: 4 to
    # a threadgroup spread over 8 of the M5 Max's 40 cores and need only 8 threadgroups launched;
    # at prefill thousands of rows fill any chip with groups of 128 threads.
    "rms_norm_gated": {"default": {"rows": 4}},
    # Output rows of a threadgroup, a multiple of 4: as few as make this many threadgroups, so that
    # 40 or 132 cores end together, but at most `rows`, which repay the norm that each begins with.
    "qmv": {"default": {"threadgroups": 768, "rows": 32}},
    # Elements of the output of a threadgroup, a power of 2 up to 16: each is 2 rows of weights in
    # gate_up, K + 1 in down. 4 make 1,152 threadgroups of 64 threads and 512 of 160 at decode:
    # enough to end together on 40 or 132 cores, with 9 KB of weights each on their way.
    "moe_gate_up": {"default": {"rows": 4}},
    "moe_down": {"default": {"rows": 4}},
    # Rows of the state of a lane at a time, some 16 values each, and the most threads of a
    # threadgroup: at decode a head's 64 KB in one turn, 32 registers a thread. A core has one head
    # or none: there are 32 for 40 or 132 of them, so all of it must be on its way at once.
    "gdn_step": {"default": {"rows": 2, "threads": 512}},
    # heads: simdgroups of a threadgroup, one head each, as rms_norm_gated's rows.
    "attn_prep": {"default": {"heads": 4}},
    # Slices of the context, over key heads, to make at least this many threadgroups, 6 a core of
    # an M5 Max, of at least `least` positions and at most `positions`, whose scores of 8 rows take
    # 8 KB of threadgroup memory. rows: query heads and tokens that share a read of the context, at
    # most 8; each is 16 registers of a lane at 256 dimensions. simdgroups of attn_split's and of
    # attn_merge's threadgroups.
    "attn_split": {
        "default": {
            "threadgroups": 240,
            "least": 32,
            "positions": 256,
            "rows": 8,
            "simdgroups": 4,
            "merging": 8,
        },
        "nvidia": {"threadgroups": 528},
    },
}


@functools.cache
def tuned(kernel: str) -> Mapping[str, int]:
    """Launch parameters of a kernel on this chip. Raises: KeyError if the table has none."""
    table = TUNING[kernel]
    values: dict[str, int] = {}
    for key in reversed(chip().keys):
        values |= table.get(key, {})
    return MappingProxyType(values)
