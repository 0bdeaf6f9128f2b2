"""Every shipped kernel, on every backend that runs here, against its MLX reference.

`pytest -m cuda tests/test_kernels.py` is the part for a machine with MLX's CUDA build.
"""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from backend_cases import each_backend, fresh_key, running
from kernels import KERNELS, cases

from lily_mlx.ops import all_ops
from lily_mlx.runtime import backends, guard

OUTPUTS = 4096  # fewer make a ratio of two RMS errors a coin toss


def label(case):
    op, variant, size = case
    return "-".join([op.name, *map(guard.describe, variant), *map(str, size.values())])


@each_backend
@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_agrees_with_mlx(backend, case):
    op, variant, size = case
    args = op.inputs(fresh_key(), *variant, **size)
    assert op.variant(*args) == variant
    with running(backend):
        assert op.check(*args) is None


@each_backend
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.op.name)
def test_no_less_accurate_than_mlx(backend, row):
    """RMS error to the fp32 result at most 1.05 times MLX's own, over at least 4,096 outputs.

    Half a unit in the last place is the floor where MLX is exact, and the fp32 result itself is
    known, a sum in whatever order, to eight units in its own last place.
    """
    size = row.sizes[-1] if row.sizes else {}
    for variant in row.variants:
        ours = stocks = floor = peak = 0.0
        count = 0
        while count < OUTPUTS:
            args = row.op.inputs(fresh_key(), *variant, **size)
            with backends.using(backend):
                got = guard.as_list(row.op.launch(*args))
            stock = guard.as_list(row.op.reference(*args))
            exact = guard.as_list(row.op.reference(*map(guard.to_fp32, args)))
            for g, s, e in zip(got, stock, exact, strict=True):
                if not mx.issubdtype(s.dtype, mx.floating):
                    continue
                half_ulp = mx.finfo(s.dtype).eps / 2
                ours += mx.square(g.astype(mx.float32) - e).sum().item()
                stocks += mx.square(s.astype(mx.float32) - e).sum().item()
                floor += mx.square(half_ulp * e).sum().item()
                peak += mx.square(e).sum().item()
                count += g.size
        allowed = max(1.05 * math.sqrt(stocks), math.sqrt(floor)) + 2**-20 * math.sqrt(peak)
        assert math.sqrt(ours) <= allowed, (variant, math.sqrt(ours / count))


@each_backend
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.op.name)
def test_the_guard_passes_it(backend, row, capfd):
    with backends.using(backend):
        row.op.forget()
        for variant in row.variants:
            assert row.op.usable(*row.op.inputs(fresh_key(), *variant)), capfd.readouterr().err
    row.op.forget()


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.op.name) for r in KERNELS if r.stock is not None]
)
def test_the_reference_is_mlx_lms(row):
    """To the bit: users who switch a kernel off get what MLX-LM gives."""
    for variant in row.variants:
        args = row.op.inputs(fresh_key(), *variant, **(row.sizes[-1] if row.sizes else {}))
        results = zip(
            guard.as_list(row.op.reference(*args)), guard.as_list(row.stock(*args)), strict=True
        )
        for ours, theirs in results:
            assert ours.dtype == theirs.dtype and mx.array_equal(ours, theirs)


def test_every_op_has_its_row():
    assert sorted(row.op.name for row in KERNELS) == sorted(all_ops())


def test_bytes_are_those_of_the_arrays():
    """The roofline counts each input and output at least once, and nothing twice over."""
    for row in KERNELS:
        args = row.op.inputs(fresh_key(), *row.variants[-1])
        arrays = [a for a in args if isinstance(a, mx.array)]
        arrays += guard.as_list(row.op.reference(*args))
        total = sum(a.nbytes for a in arrays)
        assert 0 < row.op.bytes(*args) <= total, row.op.name


@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [((33, 1, 1), (32, 1, 1)), ((32, 3, 1), (32, 2, 1)), ((16, 1, 1), (16, 1, 1)),
     ((2048, 1, 1), (2048, 1, 1))],
)  # fmt: skip
def test_a_ragged_launch_is_refused(grid, threadgroup):
    with backends.using("metal"):
        kernel = backends.kernel("rms_norm_gated")
    with pytest.raises(ValueError, match="whole threadgroups"):
        kernel([], {"T": mx.float32, "D": 8}, grid, threadgroup, [], [])
    with pytest.raises(ValueError, match=r"takes the template arguments \['D', 'T'\]"):
        kernel([], {"T": mx.float32}, grid, threadgroup, [], [])
