"""What a recorded run found: faults, and one row of counts a launch."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = (
    "out_of_bounds",
    "integer_overflow",
    "uninitialized_read",
    "missing_lane",
    "race",
    "double_write",
    "nan_born",
    "divide_by_zero",
)


@dataclass(frozen=True)
class Fault:
    """One defect, at the place where it was first seen in a launch.

    Attributes:
        kind: one of KINDS.
        kernel: the kernel's name.
        file, line: the source line; ``#line`` in the text is honoured.
        threadgroup: its position in the grid.
        lane: the thread's index in the threadgroup.
        detail: what happened, in words.
        count: how often it happened there in this launch.
    """

    kind: str
    kernel: str
    file: str
    line: int
    threadgroup: tuple[int, int, int]
    lane: int
    detail: str
    count: int = 1

    def __str__(self) -> str:
        group = ",".join(map(str, self.threadgroup))
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"{self.kind} in {self.kernel} at {self.file}:{self.line}, "
            f"threadgroup {group} lane {self.lane}: {self.detail}{times}"
        )


@dataclass
class BufferCounts:
    """Traffic of one buffer in one launch, summed over all threads.

    Attributes:
        loaded, stored: bytes that the threads asked for.
        lines: 128-byte lines touched, summed over simdgroup accesses (one instruction, 32 lanes).
        fewest_lines: the lines that the distinct bytes of those accesses would fill, packed.
        redundant: bytes that a second thread stored again with equal values.
        unwritten: bytes of an output that no thread stored.
    """

    loaded: int = 0
    stored: int = 0
    lines: int = 0
    fewest_lines: int = 0
    redundant: int = 0
    unwritten: int = 0

    @property
    def coalescing(self) -> float:
        """Fewest over actual lines: 1 is fully coalesced. 1 for a buffer without traffic."""
        return self.fewest_lines / self.lines if self.lines else 1.0


@dataclass
class Row:
    """The counts of one launch.

    Attributes:
        simd_operations: simd and quad functions that a simdgroup executed.
        barriers: threadgroup barriers that a threadgroup executed.
        threadgroup_bytes: threadgroup memory of one threadgroup.
        threadgroup_loaded, threadgroup_stored: bytes that the threads asked of it.
        float_operations: float and half additions, subtractions, multiplications, divisions and
            math calls, one each; a fused multiply-add two. bfloat arithmetic counts as the float
            operation that it is. A simd reduction counts its additions once a simdgroup, a
            simdgroup matrix product 1024. Counted in the optimised code: what the compiler folds
            or removes is not there; comparisons, conversions and integer work never are.
        uncounted: accesses left out of the line counts because a lane made too many in a row.
        aborted: the launch stopped at a fault.
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    buffers: dict[str, BufferCounts]
    simd_operations: int
    barriers: int
    threadgroup_bytes: int
    threadgroup_loaded: int
    threadgroup_stored: int
    float_operations: int
    uncounted: int
    aborted: bool


@dataclass
class Report:
    """The faults and rows of every launch inside a ``record`` block; its options as given there."""

    check: bool = True
    simd_orders: bool = False
    faults: list[Fault] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def table(self) -> list[dict]:
        """One dict a launch: kernel, grid, counts, and ``buffers`` by name with theirs."""
        out = []
        for row in self.rows:
            entry = dict(vars(row))
            entry["buffers"] = {
                name: {**vars(b), "coalescing": b.coalescing} for name, b in row.buffers.items()
            }
            out.append(entry)
        return out

    def assert_clean(self) -> None:
        """Raises AssertionError that lists the faults, if there are any."""
        if self.faults:
            raise AssertionError("\n".join(str(f) for f in self.faults))
