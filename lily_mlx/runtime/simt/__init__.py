"""A CPU executor of Metal Shading Language: a development tool, for machines without Metal.

``metal_kernel`` takes the place of ``mx.fast.metal_kernel``: the same arguments and the same
generated text, but the text is compiled for the host and runs at once, one fiber a thread, in
simdgroups of 32 lanes. ``function`` runs a kernel of any MSL text. Inside ``record`` kernels run
instrumented, and faults and memory traffic are collected; ``lane_order`` changes the order that
lanes run in.

    with simt.record() as report:
        kernel(inputs=[x], grid=(64, 1, 1), ...)
    report.assert_clean()
    for row in report.table():
        print(row["kernel"], row["buffers"]["x"]["coalescing"])

What it cannot tell: whether Apple's compiler takes the text (address spaces vanish here), how a
GPU rounds `fast::` functions and orders the sums of a matrix product (here in float, in order of
k), and time. It has no textures, no floatNxM matrices and no metal::tensor. A fast launch trusts
the kernel: an access out of bounds or an integer division by zero may end the process. Vectors are
aligned as their components, so a struct that mixes both has another layout than in MSL.
"""

from .build import BuildError
from .kernel import function, metal_kernel, record
from .report import Fault, Report
from .run import lane_order

__all__ = ["BuildError", "Fault", "Report", "function", "lane_order", "metal_kernel", "record"]
