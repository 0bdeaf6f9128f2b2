"""Each kind of fault, planted in a small kernel: reported with file, line, threadgroup and lane,
and absent from the same kernel without it."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from planted import PLANTS, PROLOGUE, Plant

from lily_mlx.runtime import simt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package"
)
FIRST_LINE = 40
THREADS = 64  # two simdgroups' worth


def launch(plant: Plant, bug: int):
    """Runs the plant; gives its faults and the line that they should name."""
    body = (PROLOGUE + plant.source).split("\n")
    marked = [n for n, line in enumerate(body) if line.endswith("//!")]
    assert len(marked) == 1, plant.id
    kernel = simt.metal_kernel(
        name="planted",
        input_names=["x"],
        output_names=["y", "z"],
        source=f'#line {FIRST_LINE} "planted.metal"\n' + "\n".join(body),
    )
    x = mx.random.uniform(1, 2, (THREADS,))
    with simt.record() as report:
        kernel(
            inputs=[x],
            template=[("BUG", bug)],
            grid=(THREADS, 1, 1),
            threadgroup=(plant.threadgroup, 1, 1),
            output_shapes=[(THREADS,)] * 2,
            output_dtypes=[mx.float32] * 2,
        )
    assert len(report.rows) == 1
    return report.faults, FIRST_LINE + marked[0]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.id)
def test_fault_is_reported_where_it_is(plant):
    faults, line = launch(plant, 1)
    here = [f for f in faults if f.kind == plant.kind and f.line == line]
    assert here, f"wanted {plant.kind} at line {line}; got {[str(f) for f in faults]}"
    fault = here[0]
    assert fault.kernel == "planted"
    assert fault.file == "planted.metal"
    assert fault.threadgroup == (plant.group, 0, 0)
    assert fault.lane == plant.lane
    assert plant.detail in fault.detail


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.id)
def test_clean_variant_has_no_fault(plant):
    faults, _ = launch(plant, 0)
    assert not faults, [str(f) for f in faults]


def run_clean(source: str, x: mx.array, threadgroup: int = 32, **options):
    """The report of a kernel y = f(x) over len(x) threads."""
    kernel = simt.metal_kernel("clean", ["x"], ["y"], source, **options)
    with simt.record() as report:
        (y,) = kernel(
            inputs=[x],
            grid=(x.size, 1, 1),
            threadgroup=(threadgroup, 1, 1),
            output_shapes=[(x.size,)],
            output_dtypes=[mx.float32],
            init_value=0 if options else None,
        )
    return report, y


def test_poison_is_no_born_nan():
    source = """
    threadgroup float buf[32];
    uint t = thread_position_in_threadgroup.x;
    y[thread_position_in_grid.x] = buf[t] * 2 + x[t];
    """
    report, y = run_clean(source, mx.ones(32))
    assert {f.kind for f in report.faults} == {"uninitialized_read"}
    assert mx.all(mx.isnan(y)).item()


def test_nan_of_the_input_is_no_fault():
    x = mx.array([1.0] * 31 + [float("nan")])
    report, y = run_clean("uint i = thread_position_in_grid.x; y[i] = x[i] * 2 + 1;", x)
    report.assert_clean()
    assert np.isnan(np.array(y)).sum() == 1


def test_nan_that_is_thrown_away_is_no_fault():
    source = """
    uint i = thread_position_in_grid.x;
    float q = (x[i] - x[i]) / (x[i] - x[i]);
    y[i] = i % 2 == 0 && q == q ? q : x[i];
    """
    report, _ = run_clean(source, mx.ones(32))
    report.assert_clean()


def test_a_load_that_the_source_makes_conditional_stays_so():
    """The compiler may not read shared memory early for a lane that would not read it."""
    source = """
    threadgroup float total[1];
    uint t = thread_position_in_threadgroup.x;
    if (t == 0) total[0] = x[0];
    float mine = 0;
    if (t == 0) mine = total[0];
    y[thread_position_in_grid.x] = mine + (t == 0 ? total[0] : 1);
    """
    report, _ = run_clean(source, mx.ones(96), threadgroup=96)
    report.assert_clean()
    assert report.rows[0].threadgroup_loaded <= 2 * 4


def test_a_wrap_that_does_not_reach_the_index_is_no_overflow():
    source = """
    uint i = thread_position_in_grid.x;
    uint hash = (i + 1) * 2654435761u;
    y[i] = x[i + 1] + (hash & 1);
    """
    report, _ = run_clean(source, mx.ones(32))
    assert [f.kind for f in report.faults] == ["out_of_bounds"]


def test_atomic_sums_and_equal_stores_are_no_fault():
    source = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&y[i % 2], x[i], memory_order_relaxed);
    """
    report, y = run_clean(source, mx.ones(96), atomic_outputs=True)
    report.assert_clean()
    assert y[:2].tolist() == [48, 48]
    report, _ = run_clean("y[thread_position_in_threadgroup.x / 4] = x[0];", mx.ones(64))
    report.assert_clean()
    assert report.rows[0].buffers["y"].redundant == 4 * (64 - 8)
    assert report.rows[0].buffers["y"].unwritten == 4 * (64 - 8)


def test_simd_functions_order_memory_only_if_asked():
    source = """
    threadgroup float buf[32];
    uint t = thread_index_in_simdgroup;
    buf[t] = 0;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    buf[t] = x[t];
    float s = simd_sum(x[t]);
    y[t] = buf[t ^ 1] + s;
    """
    kernel = simt.metal_kernel("ordered", ["x"], ["y"], source)
    for simd_orders in (False, True):
        with simt.record(simd_orders=simd_orders) as report:
            kernel(
                inputs=[mx.ones(32)],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(32,)],
                output_dtypes=[mx.float32],
            )
        assert {f.kind for f in report.faults} == (set() if simd_orders else {"race"})
