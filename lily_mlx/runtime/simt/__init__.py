"""A CPU executor of Metal Shading Language: a development tool, for machines without Metal.

``metal_kernel`` takes the place of ``mx.fast.metal_kernel``: the same arguments and the same
generated text, but the text is compiled for the host and runs at once, one fiber a thread, in
simdgroups of 32 lanes. ``function`` runs a kernel of any MSL text. Inside ``record`` kernels run
instrumented, and faults and memory traffic are collected.
"""

from .build import BuildError
from .kernel import function, metal_kernel, record
from .report import Fault, Report
from .run import lane_order

__all__ = ["BuildError", "Fault", "Report", "function", "lane_order", "metal_kernel", "record"]
