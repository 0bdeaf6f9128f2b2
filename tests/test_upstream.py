"""Kernels that this project did not write, run by the CPU executor.

Their text comes from the installed packages when the test runs: mlx_lm's custom kernels, and the
headers that the MLX wheel ships. Each runs on random input at awkward sizes, agrees with MLX's CPU
operations in float32, gives equal bits instrumented and not and in any lane order, and raises no
fault.
"""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import upstream_headers
from conftest import SEED
from upstream_cases import CASES, Upstream, kl_forward

from lily_mlx.runtime import simt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package"
)
HEADERS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
TABLE: list[tuple[str, str, str, str]] = []


@pytest.fixture(scope="module")
def upstream():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", simt.metal_kernel)
        patch.setattr(mx.metal, "is_available", lambda: True)
        modules = Upstream()
        yield modules
        modules.forget()


@pytest.mark.parametrize("name", CASES)
def test_kernel(name, upstream):
    this = CASES[name](upstream)
    this.run()  # builds
    start = time.perf_counter()
    plain = this.run()
    mx.eval(plain)
    took = time.perf_counter() - start
    with simt.lane_order("random", SEED):
        shuffled = this.run()
    with simt.record(simd_orders=this.simd_orders) as report:
        checked = this.run()
    assert report.rows
    report.assert_clean()
    worst = 0.0
    for out, again, other, reference, tolerance in zip(
        plain, checked, shuffled, this.references, this.tolerances, strict=True
    ):
        assert mx.array_equal(out, again).item(), "instrumented and plain runs differ"
        assert mx.array_equal(out, other).item(), "the result depends on the lanes' order"
        error = mx.abs(out.astype(mx.float32) - reference.astype(mx.float32))
        worst = max(worst, mx.max(error).item())
        assert mx.all(error <= tolerance).item(), f"{name}: off by {mx.max(error).item()}"
    note = "simd functions order its memory" if this.simd_orders else ""
    TABLE.append((name, f"{worst:.1e}", f"{took * 1e3:.1f}", note))


BARRIER = re.compile(r"threadgroup_barrier\(mem_flags::mem_threadgroup\);")


@pytest.mark.parametrize("header", ["softmax.h", "logsumexp.h"])
def test_each_barrier_of_a_row_reduction_is_missed(header):
    """Without any one of its barriers the kernel races; with all of them it does not."""
    text = (HEADERS / header).read_text()
    kernel = {"softmax.h": "softmax_single_row", "logsumexp.h": "logsumexp"}[header]
    # The file's first kernel.
    end = text.index("[[kernel]]", text.index("[[kernel]]") + 1)
    places = [m.span() for m in BARRIER.finditer(text[:end])]
    x = mx.random.normal((1, 1001))
    shape = (1, 1001) if header == "softmax.h" else (1,)
    found = {}
    for place in [None, *places]:
        cut = text if place is None else text[: place[0]] + text[place[1] :]
        run = simt.function(upstream_headers.shipped() + cut, f"{kernel}<float>")
        with simt.record() as report:
            run(
                buffers={0: x, 2: np.array([1001], np.int32)},
                outputs={1: (shape, mx.float32)},
                grid=(256, 1, 1),
                threadgroup=(256, 1, 1),
            )
        found[place] = {f.kind for f in report.faults}
    assert len(places) >= 4
    assert found.pop(None) == set()
    assert all(kinds & {"race", "uninitialized_read"} for kinds in found.values()), found


def test_the_races_of_mlx_lm_kl_forward_are_found(upstream):
    case = kl_forward(upstream, repair=False)
    with simt.record() as report:
        case.run()
    assert {f.kind for f in report.faults} == {"race"}
    assert all("shared" in f.detail for f in report.faults)


def test_device_tensors_are_refused():
    header = "steel/gemm/kernels/steel_gemm_thin_nax.h"
    text = upstream_headers.shipped("steel/gemm/gemm.h", "steel/gemm/gemm_nax.h", header)
    thin = simt.function(text, "gemm_thin_nax<float, 1, 1, true, true, true, 1, 1, 1, true>")
    with pytest.raises(simt.BuildError, match="no template named 'tensor' in namespace 'metal'"):
        thin(
            buffers={i: mx.zeros(64) for i in (0, 1, 2, 4, 5)},
            outputs={3: ((8, 8), mx.float32)},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )
    TABLE.append(("gemm_thin_nax", "-", "-", "not run: the executor has no metal::tensor"))


def test_table(capsys):
    rows = list(TABLE)
    if not any("rms_norm" in f.name for f in HEADERS.rglob("*.h")):
        rows.append(
            ("MLX's rms_norm", "-", "-", "not run: the wheel ships headers, not .metal files")
        )
    with capsys.disabled():
        print(f"\n{'kernel':40} {'error':>8} {'ms':>8}")
        for name, error, took, note in rows:
            print(f"{name:40} {error:>8} {took:>8}  {note}")
    assert rows
