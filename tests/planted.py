"""Small kernels with a fault each, for test_faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Plant:
    """A kernel with a fault when BUG is 1. The line that ends in ``//!`` is the one to report."""

    id: str
    kind: str
    source: str
    group: int  # where the first fault is: threadgroup x and lane
    lane: int
    threadgroup: int = 32
    detail: str = ""


PROLOGUE = """
uint i = thread_position_in_grid.x;
uint t = thread_position_in_threadgroup.x;
"""

PLANTS = [
    Plant("read past the end", "out_of_bounds", "y[i] = x[i + BUG];  //!", 1, 31),
    Plant("read before the start", "out_of_bounds", "y[i] = x[int(i) - BUG];  //!", 0, 0),
    Plant("write past the end", "out_of_bounds", "y[i + BUG] = x[i];  //!", 1, 31),
    Plant(
        "write past the end in one of two branches",
        "out_of_bounds",
        """
        if (t & 1) {
            y[i + BUG] = x[i] * 2;  //!
        } else {
            y[i + BUG] = x[i] + 3;
        }
        """,
        1,
        31,
    ),
    Plant(
        "vector read past the end",
        "out_of_bounds",
        """
        auto v = (const device float4*)(x + (BUG ? i : 0));
        y[i] = v[0].w;  //!
        """,
        1,
        29,
    ),
    Plant(
        "threadgroup array, by pointer",
        "out_of_bounds",
        """
        threadgroup float buf[32];
        threadgroup float* p = buf;
        p[t + BUG] = x[i];  //!
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = buf[BUG ? t : t];
        """,
        0,
        31,
    ),
    Plant(
        "array of fixed size",
        "out_of_bounds",
        """
        float mine[4] = {0, 1, 2, 3};
        y[i] = mine[(t & 3) + BUG] + x[i];  //!
        """,
        0,
        3,
        detail="index 4",
    ),
    Plant(
        "unsigned index wraps",
        "integer_overflow",
        "y[i] = x[i - BUG];  //!",
        0,
        0,
        detail="wrapped at",
    ),
    Plant(
        "signed index overflows",
        "integer_overflow",
        """
        int far = (BUG ? 2147483647 : 0) - 40 * BUG;
        int j = far + int(i);  //!
        y[i] = x[j & 63];
        """,
        1,
        9,
        detail="signed + overflows",
    ),
    Plant(
        "threadgroup memory never written",
        "uninitialized_read",
        """
        threadgroup float buf[32];
        if (t < 32 - BUG) buf[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = 2 * buf[t ^ 1];  //!
        """,
        0,
        30,
        detail="buf",
    ),
    Plant(
        "output never written",
        "uninitialized_read",
        """
        if (BUG == 0) y[i] = 1;
        y[i] += x[i];  //!
        """,
        0,
        0,
        detail="y",
    ),
    Plant(
        "lane skips a barrier",
        "missing_lane",
        """
        if (t != 5 * BUG || BUG == 0)
            threadgroup_barrier(mem_flags::mem_threadgroup);  //!
        y[i] = x[i];
        """,
        0,
        5,
        detail="threadgroup_barrier",
    ),
    Plant(
        "simdgroup returns before a barrier",
        "missing_lane",
        """
        if (BUG && t >= 32) return;
        threadgroup_barrier(mem_flags::mem_threadgroup);  //!
        y[i] = x[i];
        """,
        0,
        32,
        threadgroup=64,
        detail="had ended",
    ),
    Plant(
        "two barriers taken for one",
        "missing_lane",
        """
        if (BUG && t == 9) threadgroup_barrier(mem_flags::mem_threadgroup);
        else threadgroup_barrier(mem_flags::mem_threadgroup);  //!
        y[i] = x[i];
        """,
        0,
        9,
    ),
    Plant(
        "lane skips a simd_sum",
        "missing_lane",
        """
        float s = x[i];
        if (BUG == 0 || t != 7) s = simd_sum(s);  //!
        y[i] = s;
        """,
        0,
        7,
        detail="simd_sum",
    ),
    Plant(
        "lane returns before a shuffle",
        "missing_lane",
        """
        if (BUG && t == 11) return;
        y[i] = simd_shuffle_xor(x[i], 1);  //!
        """,
        0,
        11,
        detail="simd_shuffle_xor",
    ),
    Plant(
        "read before a barrier",
        "race",
        """
        threadgroup float buf[32];
        buf[t] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        buf[t] = x[i];
        if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = buf[t ^ 1];  //!
        """,
        0,
        1,
        detail="thread 0",
    ),
    Plant(
        "write after another's read",
        "race",
        """
        threadgroup float buf[32];
        buf[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float next = buf[(t + 1) & 31];
        if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
        buf[t] = next;  //!
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = buf[t];
        """,
        0,
        1,
        detail="write",
    ),
    Plant(
        "write after the whole simdgroup's read",
        "race",
        """
        threadgroup float first[2];
        if (t < 2) first[t] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float seen = first[0];
        if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t == 40) first[0] = x[i];  //!
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = first[0] + seen;
        """,
        0,
        40,
        threadgroup=64,
    ),
    Plant(
        "simdgroup barrier across simdgroups",
        "race",
        """
        threadgroup float buf[64];
        buf[t] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        buf[t] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = buf[BUG ? t ^ 32 : t ^ 1];  //!
        """,
        0,
        32,
        threadgroup=64,
    ),
    Plant(
        "barrier for the wrong memory",
        "race",
        """
        threadgroup float buf[32];
        buf[t] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        buf[t] = x[i];
        threadgroup_barrier(BUG ? mem_flags::mem_device : mem_flags::mem_threadgroup);
        y[i] = buf[t ^ 1];  //!
        """,
        0,
        0,
    ),
    Plant(
        "device memory without its barrier",
        "race",
        """
        y[i] = x[i];
        threadgroup_barrier(BUG ? mem_flags::mem_threadgroup : mem_flags::mem_device);
        z[i] = y[i ^ 1];  //!
        """,
        0,
        0,
    ),
    Plant(
        "two threads write an element",
        "double_write",
        "y[BUG ? i / 2 : i] = x[i];  //!",
        0,
        1,
        detail="thread 0",
    ),
    Plant(
        "two threadgroups write an element",
        "double_write",
        "y[BUG ? t : i] = x[i];  //!",
        1,
        0,
    ),
    Plant(
        "NaN born in a division",
        "nan_born",
        """
        float zero = i == 37 ? 0 : 1;
        float q = (zero * x[i]) / (BUG ? zero : 1);  //!
        float r = q + 1;
        y[i] = r;
        """,
        1,
        5,
    ),
    Plant(
        "NaN born in a math function",
        "nan_born",
        "y[i] = metal::sqrt(x[i] * (BUG && i == 3 ? -1 : 1));  //!",
        0,
        3,
    ),
    Plant(
        "integer division by zero",
        "divide_by_zero",
        "y[i] = x[40 / (t == 12 ? 1 - BUG : 1)];  //!",
        0,
        12,
    ),
]
