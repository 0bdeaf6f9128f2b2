"""The guard: a bad kernel goes off alone, says so in one line, and MLX's result comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import mlx.core as mx
import pytest
from backend_cases import BACKENDS, each_backend

from lily_mlx.ops import all_ops, norm
from lily_mlx.runtime import backends, guard, source
from lily_mlx.runtime.guard import Op

CAN_RUN = [name for name, (can, _) in BACKENDS.items() if can]


def reference(x, scale):
    return x * scale


def inputs(key, dtype, n=37):
    return mx.random.normal((n,), key=key).astype(dtype), 2.0


def planted(launch, name="planted"):
    """An op called `name` whose launch is `launch`; on no backend's books but the guard's."""
    launch.__name__ = name
    return Op(launch, reference, lambda x, scale: (x.dtype,), inputs, lambda x, scale: 2 * x.nbytes)


@pytest.fixture
def registry(monkeypatch):
    """A guard with no ops, on a backend that runs kernels."""
    monkeypatch.setattr(guard, "_registry", {})
    with backends.using("metal"):
        yield


def good(x, scale):
    return x * scale


def wrong(x, scale):
    return x * scale + 1


def nans(x, scale):
    return mx.where(mx.arange(x.size) == 3, mx.nan, x * scale).astype(x.dtype)


def raises(x, scale):
    raise RuntimeError("Unable to build metal library\nprogram_source:3:1: error: no such thing")


def wrong_shape(x, scale):
    return (x * scale)[1:]


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (wrong, "output 0 is off by"),
        (nans, "output 0 is off by nan"),
        (raises, "RuntimeError: Unable to build metal library program_source"),
        (wrong_shape, "output 0 is bfloat16[36], not bfloat16[37]"),
    ],
)
def test_a_bad_kernel_is_replaced_by_mlx(registry, capfd, launch, reason):
    op = planted(launch)
    x = mx.random.normal((5,)).astype(mx.bfloat16)
    for _ in range(2):
        assert mx.array_equal(op(x, 3.0), x * 3.0)
    assert not op.usable(x, 3.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lily_mlx: planted (bfloat16) is off, MLX runs in its place: ")
    assert reason in line and mx.__version__ in line
    (row,) = guard.table()
    assert (row.op, row.state) == ("planted", "disabled") and reason in row.detail


def test_a_good_kernel_runs_and_is_checked_once(registry, capfd):
    calls = []

    def launch(x, scale):
        calls.append(x.shape)
        return good(x, scale)

    op = planted(launch)
    assert guard.table() == [guard.Row("planted", "not used yet", "")]
    x = mx.random.normal((5,))
    for _ in range(3):
        assert mx.array_equal(op(x, 3.0), x * 3.0)
    assert calls == [(37,), (5,), (5,), (5,)]
    assert guard.table() == [guard.Row("planted", "ok", "float32")]
    assert capfd.readouterr().err == ""


def test_only_the_bad_variant_goes_off(registry, capfd):
    op = planted(lambda x, scale: wrong(x, scale) if x.dtype == mx.float16 else good(x, scale))
    x = mx.random.normal((5,))
    assert op.usable(x, 1.0)
    assert not op.usable(x.astype(mx.float16), 1.0)
    assert op.usable(x.astype(mx.bfloat16), 1.0)
    assert {s.variant: s.ok for s in op.states()} == {
        (mx.float32,): True,
        (mx.float16,): False,
        (mx.bfloat16,): True,
    }
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_arguments_that_the_kernel_does_not_serve(registry, capfd):
    """No variant, no kernel: the reference, without a word and without a check."""
    op = Op(raises, reference, lambda x, scale: None, inputs, lambda x, scale: 0)
    x = mx.random.normal((5,))
    assert mx.array_equal(op(x, 3.0), x * 3.0) and not op.usable(x, 3.0)
    assert op.states() == [] and capfd.readouterr().err == ""
    args = norm.rms_norm_gated.inputs(mx.random.key(1), mx.bfloat16, 8)
    assert norm.rms_norm_gated.variant(*args) == (mx.bfloat16, 8)
    assert norm.rms_norm_gated.variant(*args[:2], args[2].astype(mx.float32)) is None
    assert norm.rms_norm_gated.variant(args[0][:0], *args[1:]) is None


def test_rounding_is_not_disagreement(registry):
    """Another order of sums, in the same precision, passes in each dtype; a wrong scale fails."""

    def inputs(key, dtype):
        return (mx.random.normal((64, 512), key=key).astype(dtype),)

    def other_order(x):
        halves = x[:, ::-1].astype(mx.float32).reshape(64, 2, 256).sum(-1)
        return (halves[:, 0] + halves[:, 1]).astype(x.dtype)

    def summed(x):
        return x.astype(mx.float32).sum(-1).astype(x.dtype)

    for scale, agrees in ((1.0, True), (1.05, False)):
        op = Op(
            lambda x, s=scale: other_order(x) * mx.array(s, x.dtype),
            summed,
            lambda x: (x.dtype,),
            inputs,
            lambda x: x.nbytes,
        )
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            reason = op.check(*inputs(mx.random.key(mx.random.randint(0, 1000).item()), dtype))
            assert (reason is None) is agrees, (dtype, reason)


@pytest.mark.parametrize("transform", ["compile", "grad", "vmap", "compile of grad", "checkpoint"])
def test_the_first_use_may_be_inside_a_trace(registry, transform):
    """The check runs on values of its own and leaves the trace as it was."""
    seen = []

    def launch(x, scale):
        seen.append(x.size)
        return good(x, scale)

    op = planted(launch)

    def loss(x):
        return (op(x, 3.0) * x).sum()

    transforms = {
        "compile": (mx.compile(loss), lambda x: (3 * x * x).sum()),
        "grad": (mx.grad(loss), lambda x: 6 * x),
        "vmap": (mx.vmap(loss), lambda x: (3 * x * x).sum(-1)),
        "compile of grad": (mx.compile(mx.grad(loss)), lambda x: 6 * x),
        "checkpoint": (mx.checkpoint(loss), lambda x: (3 * x * x).sum()),
    }
    run, wanted = transforms[transform]
    for _ in range(2):
        x = mx.random.normal((4, 6))
        assert mx.allclose(run(x), wanted(x), rtol=1e-5)
    assert seen[0] == 37  # the check's own case, then the caller's
    assert [s.ok for s in op.states()] == [True]


def test_the_first_use_leaves_the_callers_random_numbers(registry):
    op = planted(good)
    mx.random.seed(7)
    wanted = mx.random.normal((3,))
    mx.random.seed(7)
    op(mx.ones((3,)), 1.0)
    assert mx.array_equal(mx.random.normal((3,)), wanted)


def test_threads_check_once_and_all_get_the_result(registry, capfd):
    calls = []

    def launch(x, scale):
        calls.append(threading.get_ident())
        time.sleep(0.05)
        raise RuntimeError("not here")

    op = planted(launch)
    results, start = [], threading.Barrier(8)

    def use():
        start.wait()
        with mx.stream(mx.new_stream(mx.default_device())):
            results.append(op(mx.ones((4,)), 2.0).tolist())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [[2.0] * 4] * 8
    assert len(capfd.readouterr().err.splitlines()) == 1


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if not k.startswith("LILY_")} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


USE = """
import mlx.core as mx
from lily_mlx.ops import norm
from lily_mlx.runtime import backends, guard
{before}
args = norm.rms_norm_gated.inputs(mx.random.key(1), mx.float32, 8)
assert mx.array_equal(norm.rms_norm_gated(*args), norm.rms_norm_gated_reference(*args))
print(guard.table()[0].state, guard.table()[0].detail, sep=" | ")
"""


def test_backend_by_name():
    got = run_python(USE.format(before=""), LILY_BACKEND="cdua")
    last = got.stderr.splitlines()[-1]
    assert last == "ValueError: LILY_BACKEND=cdua: it must be one of metal, cuda, simt, reference"
    got = run_python(USE.format(before=""), LILY_BACKEND="reference")
    assert got.stdout.strip() == "disabled | float32, 8: reference backend" and not got.stderr


@pytest.mark.skipif("simt" not in CAN_RUN, reason=BACKENDS["simt"][1])
def test_the_executor_by_name():
    """The whole way: the environment variable, the first use, in a call that is compiled."""
    got = run_python(
        """
import mlx.core as mx
from lily_mlx.ops import norm
from lily_mlx.runtime import guard
args = norm.rms_norm_gated.inputs(mx.random.key(1), mx.bfloat16, 48)
run = mx.compile(lambda *a: norm.rms_norm_gated(*a, 1e-6) * 2)
ours, mlxs = run(*args[:3]), norm.rms_norm_gated_reference(*args) * 2
assert mx.allclose(ours, mlxs, rtol=0.02, atol=1e-3), (ours, mlxs)
print(guard.table()[0].state, guard.table()[0].detail, sep=" | ")
""",
        LILY_BACKEND="simt",
    )
    assert got.stdout.strip() == "ok | bfloat16, 48" and not got.stderr, got.stderr


def test_backend_without_its_device():
    missing = next(n for n in ("metal", "cuda") if n not in CAN_RUN)
    got = run_python(USE.format(before=""), LILY_BACKEND=missing)
    assert f"this build of MLX has no {missing} device" in got.stderr.splitlines()[-1]


def test_kernels_are_disabled_by_hand():
    force = "backends._chosen = 'metal'"
    got = run_python(USE.format(before=force), LILY_DISABLE="rms_norm_gated")
    assert got.stdout.strip() == "disabled | LILY_DISABLE" and not got.stderr
    got = run_python(USE.format(before=force), LILY_DISABLE="rms_norm_gated, rms_nrom")
    (line,) = got.stderr.splitlines()
    assert line.startswith("lily_mlx: LILY_DISABLE: no kernel rms_nrom; there are ")
    assert "rms_norm_gated" in line


def test_every_kernel_file_belongs_to_an_op():
    owned = [name for op in all_ops().values() for name in op.kernels]
    assert sorted(owned) == sorted(source.names())


# The same, with kernels that a backend really compiles.

TEMPLATE = """// out = x * scale.
#include <metal_stdlib>
using namespace metal;
template <typename T>
[[kernel]] void planted(
    const device T* x [[buffer(0)]],
    const constant float* scale [[buffer(1)]],
    device T* out [[buffer(2)]],
    uint3 at [[thread_position_in_grid]]) {
  const uint i = min(at.x, uint(36));
  %s;
}
"""
BODIES = {
    "good": "out[i] = T(float(x[i]) * scale[0])",
    "does not compile": "out[i] = T(no_such_function(x[i]))",
    "off by one element": "out[i] = T(float(x[i == 36 ? 0 : i + 1]) * scale[0])",
    "NaN": "out[i] = T(i == 5 ? NAN : float(x[i]) * scale[0])",
}


@each_backend
@pytest.mark.parametrize("body", BODIES)
def test_planted_kernels(tmp_path, monkeypatch, capfd, backend, body):
    monkeypatch.setattr(guard, "_registry", {})
    path = tmp_path / "planted.metal"
    path.write_text(TEMPLATE % BODIES[body])
    text = source.parse(path)
    with backends.using(backend):
        kernel = backends.build(text, backend)

        def launch(x, scale):
            return kernel(
                inputs=[x, mx.array([scale])],
                template={"T": x.dtype},
                grid=(64, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[x.shape],
                output_dtypes=[x.dtype],
            )[0]

        op = planted(launch)
        x = mx.random.normal((37,)).astype(mx.bfloat16)
        result = op(x, 3.0)
        assert mx.allclose(result.astype(mx.float32), x.astype(mx.float32) * 3, rtol=0.01)
        lines = [s for s in capfd.readouterr().err.splitlines() if s.startswith("lily_mlx: ")]
        assert op.usable(x, 3.0) is (body == "good") and len(lines) == (body != "good")
        if body == "good":  # and no silent wrong gradient
            with pytest.raises(ValueError, match="vjp"):
                mx.eval(mx.grad(lambda x: op(x, 3.0).sum())(x))


@pytest.mark.skipif("simt" not in CAN_RUN, reason=BACKENDS["simt"][1])
def test_the_executor_names_the_line_of_the_kernel_file(tmp_path):
    from lily_mlx.runtime import simt

    path = tmp_path / "planted.metal"
    path.write_text(TEMPLATE % "if (at.x == 3) out[i + 64] = x[0]")
    with simt.record() as report:
        backends.build(source.parse(path), "simt")(
            inputs=[mx.ones((37,)), mx.ones((1,))],
            template={"T": mx.float32},
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(37,)],
            output_dtypes=[mx.float32],
        )
    line = next(n for n, s in enumerate(path.read_text().splitlines(), 1) if "out[i + 64]" in s)
    fault = next(f for f in report.faults if f.kind == "out_of_bounds")
    assert (fault.file, fault.line) == (f"{tmp_path.name}/planted.metal", line)


def test_a_call_after_the_first_is_a_lookup(registry, monkeypatch):
    """No lock, no check, no reference, no text: nothing of the guard but its table."""
    op = planted(good)
    x = mx.random.normal((4,))
    op(x, 1.0)

    def fail(*_, **__):
        raise AssertionError("touched on the hot path")

    class Lock:
        __enter__ = __exit__ = fail

    for name in ("_lock", "backend", "disabled", "as_list", "describe"):
        monkeypatch.setattr(guard, name, Lock() if name == "_lock" else fail)
    op.reference = op.inputs = op.check = fail
    assert mx.array_equal(op(x, 3.0), x * 3.0) and op.usable(x, 3.0)


def test_the_reference_backend_has_gradients():
    """On the reference backend an op is plain MLX, so its gradient is right."""
    args = norm.rms_norm_gated.inputs(mx.random.key(3), mx.float32, 16)
    with backends.using("reference"):
        norm.rms_norm_gated.forget()
        grads = mx.grad(lambda x: norm.rms_norm_gated(x, *args[1:]).sum())(args[0])
        wanted = mx.grad(lambda x: norm.rms_norm_gated_reference(x, *args[1:]).sum())(args[0])
    norm.rms_norm_gated.forget()
    assert mx.allclose(grads, wanted)
