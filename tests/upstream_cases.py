"""What test_upstream runs: the cases of mlx_lm's kernels, and what all cases share.

Tolerance: a sum of n terms, rounded at each step, is off by at most 8 sqrt(n) u sum|terms| but
with a probability below 1e-10 (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019); u is 2^-24, and
the operations compared with add as much. A result of type T adds its own roundings.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import mlx.core as mx
import mlx_lm

MARK = "executed_"  # begins the names of the modules loaded for the executor
UNIT = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8}


@dataclass
class Case:
    """``run`` gives arrays that each agree with a float32 reference to within a tolerance.

    ``simd_orders`` is set where the kernel relies on simd functions to order its memory.
    """

    run: Callable[[], list[mx.array]]
    references: list[mx.array]
    tolerances: list[object]
    simd_orders: bool = False


CASES: dict[str, Callable[[Upstream], Case]] = {}


def case(name: str):
    """Registers a function (modules) -> Case under the name of a table row."""

    def keep(function):
        CASES[name] = function
        return function

    return keep


class Upstream:
    """mlx_lm's modules, loaded afresh while the executor stands in for Metal."""

    def load(self, path: str):
        """The module at a path below mlx_lm, beside the original under another name."""
        folder, _, stem = path.rpartition("/")
        name = ".".join(["mlx_lm", *folder.split("/"), MARK + stem]).replace("..", ".")
        if name not in sys.modules:
            file, package = Path(mlx_lm.__file__).parent / path, None
            if file.is_dir():
                file, package = file / "__init__.py", [str(file)]
            spec = importlib.util.spec_from_file_location(
                name, file.with_suffix(".py"), submodule_search_locations=package
            )
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    def forget(self) -> None:
        for name in [n for n in sys.modules if MARK in n]:
            del sys.modules[name]

    @property
    def delta(self):
        return self.load("models/gated_delta")

    @property
    def kernels(self):
        return self.load("kernels")


def bound(terms: int, scale) -> object:
    return 2 * 8 * math.sqrt(terms) * UNIT[mx.float32] * scale


def rounded(dtype: mx.Dtype, reference: mx.array, times: int = 1):
    """What ``times`` roundings to the type add."""
    return times * UNIT[dtype] * mx.abs(reference)


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


# ---- mlx_lm/models/gated_delta.py


def delta_inputs(B, T, Hk, Hv, Dk, Dv, vector_gate=False):
    q, k = normal(B, T, Hk, Dk), normal(B, T, Hk, Dk)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    gate = (B, T, Hv, Dk) if vector_gate else (B, T, Hv)
    return (
        q,
        k,
        normal(B, T, Hv, Dv),
        mx.random.uniform(0.6, 1, gate),
        mx.random.uniform(0, 1, (B, T, Hv)),
        normal(B, Hv, Dv, Dk),
    )


def delta_tolerance(arrays, T):
    """q and k have unit length, so a sum's absolute terms stay below a state row's length."""
    q, _, v, _, _, state = arrays
    row = mx.max(mx.linalg.norm(state, axis=-1)).item() + T * mx.max(mx.abs(v)).item()
    return [bound(T * (q.shape[-1] + 4), row)] * 2


def delta_case(upstream, function, mask=False, vector_gate=False, Dv=24):
    B, T, Hk, Hv, Dk = 2, 7, 2, 4, 128
    arrays = delta_inputs(B, T, Hk, Hv, Dk, Dv, vector_gate)
    keep = mx.random.uniform(shape=(B, T)) < 0.6 if mask else None
    y, state = upstream.delta.gated_delta_ops(*arrays, keep)
    if mask:  # the kernel gives zero where the operations give a value that nobody reads
        y = mx.where(keep[:, :, None, None], y, 0)
    run = getattr(upstream.delta, function)
    return Case(lambda: list(run(*arrays, keep)), [y, state], delta_tolerance(arrays, T))


case("gated_delta_step, packed")(lambda u: delta_case(u, "gated_delta_kernel"))
case("gated_delta_step, unpacked")(lambda u: delta_case(u, "gated_delta_kernel_unpacked"))
case("gated_delta_step, xtree")(lambda u: delta_case(u, "gated_delta_kernel_xtree"))
case("gated_delta_step, mask")(lambda u: delta_case(u, "gated_delta_kernel", mask=True))
case("gated_delta_step, vector gate")(
    lambda u: delta_case(u, "gated_delta_kernel", vector_gate=True)
)
case("gated_delta_step, vector gate, mask")(
    lambda u: delta_case(u, "gated_delta_kernel", mask=True, vector_gate=True)
)

# ---- mlx_lm/kernels


def rms(x: mx.array, eps: float) -> mx.array:
    x = x.astype(mx.float32)
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)


@case("expert_routing")
def expert_routing(upstream):
    logits, bias, top, eps, scale = normal(5, 77), normal(77) * 0.1, 6, 1e-9, 2.5
    score = mx.sigmoid(logits * 1.5)
    inds = mx.argsort(-(score + bias), axis=-1)[:, :top]
    w = mx.take_along_axis(score, inds, axis=-1)
    weights = w / (w.sum(axis=-1, keepdims=True) + eps) * scale
    run = partial(
        upstream.kernels.expert_routing,
        logits,
        bias,
        top_k=top,
        multiplier=1.5,
        score_eps=eps,
        route_scale=scale,
    )
    return Case(run, [inds, weights], [0, bound(top + 16, scale)])


def norm_case(upstream, dtype, next_norm):
    D, eps = 1000, 1e-6
    branch, stream = normal(3, D, dtype=dtype), normal(3, D)
    alpha, beta, post, pre = normal(D), normal(D), normal(D, dtype=dtype), normal(D, dtype=dtype)
    norm = type("Norm", (), {"weight": pre, "eps": eps})
    scaled = (post * branch).astype(mx.float32)
    branch_part = beta * rms(scaled, eps).astype(dtype).astype(mx.float32)
    new = alpha * stream + branch_part
    tolerance = bound(D, 1) * (mx.abs(new) + mx.abs(branch_part)) + rounded(dtype, branch_part, 2)
    references, tolerances = [new], [tolerance]
    if next_norm:
        normed = rms(new, eps) * pre.astype(mx.float32)
        references.append(normed)
        lost = mx.max(tolerance) * mx.rsqrt(mx.mean(new * new, axis=-1, keepdims=True))
        tolerances.append(
            2 * lost * mx.abs(pre.astype(mx.float32))
            + bound(D, 1) * mx.abs(normed)
            + rounded(dtype, normed)
        )
    call = partial(
        upstream.kernels.norm_add_norm,
        branch,
        stream,
        alpha=alpha,
        beta=beta,
        post_weight=post,
        post_eps=eps,
        next_norm=norm if next_norm else None,
    )
    return Case(lambda: [a for a in call() if a is not None], references, tolerances)


case("norm_add_norm, bf16")(lambda u: norm_case(u, mx.bfloat16, True))
case("norm_add_norm, fp32")(lambda u: norm_case(u, mx.float32, True))
case("norm_add, bf16")(lambda u: norm_case(u, mx.bfloat16, False))


@case("norm_add_norm_pre_norm, bf16")
def pre_norm(upstream):
    stream, weight = normal(5, 330), normal(330, dtype=mx.bfloat16)
    norm = type("Norm", (), {"weight": weight, "eps": 1e-5})
    reference = rms(stream, 1e-5) * weight.astype(mx.float32)
    run = partial(upstream.kernels.pre_norm, stream, norm, dtype=mx.bfloat16)
    tolerance = bound(330, 1) * mx.abs(reference) + rounded(mx.bfloat16, reference)
    return Case(lambda: [run()], [reference], [tolerance])


def qk_case(upstream, rope):
    heads, kv_heads, D, eps, scale = 5, 2, 80, 1e-6, 0.3
    qkvg = normal(2, 3, 2 * (heads + kv_heads) * D)
    parts = qkvg[..., : (heads + kv_heads) * D].reshape(2, 3, heads + kv_heads, D)
    normed = rms(parts, eps)
    q, k = normed[:, :, :heads] * scale, normed[:, :, heads:]
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": D}
    sizes |= {"eps": eps, "query_scale": scale}
    if not rope:
        run = partial(upstream.kernels.qk_norm, qkvg, **sizes)
        return Case(run, [q, k], [bound(D, 1) * mx.abs(q), bound(D, 1) * mx.abs(k)])
    offset = 11

    def turn(x):
        turned = mx.fast.rope(
            x.transpose(0, 2, 1, 3), D, traditional=True, base=1e4, scale=1.0, offset=offset
        )
        return turned.transpose(0, 2, 1, 3)

    run = partial(upstream.kernels.qk_norm_rope, qkvg, **sizes, rope_base=1e4, offset=offset)
    # An angle of up to offset + 3 radians carries a few of its own roundings into sin and cos.
    slack = bound(D, 1) + bound(4, offset + 3)
    return Case(run, [turn(q), turn(k)], [slack * mx.max(mx.abs(q)), slack * mx.max(mx.abs(k))])


case("qk_norm")(lambda u: qk_case(u, False))
case("qk_norm_rope")(lambda u: qk_case(u, True))


@case("post_expert_norm_combine")
def combine(upstream):
    experts, weights, norm_weight = normal(3, 4, 1000), normal(3, 4), normal(1000)
    terms = rms(experts * norm_weight, 1e-6) * weights[..., None]
    run = partial(
        upstream.kernels.post_expert_norm_combine,
        experts,
        weights,
        norm_weight=norm_weight,
        eps=1e-6,
    )
    return Case(lambda: [run()], [terms.sum(axis=1)], [bound(1000, mx.abs(terms).sum(axis=1))])


@case("rms_norm_sigmoid_gate, strided")
def norm_gate(upstream):
    B, H, L, D = 2, 3, 5, 72
    x = normal(B, L, H, D).transpose(0, 2, 1, 3)  # read through its strides
    gate = normal(B, L, 2 * H * D)[..., ::2]
    out = rms(x, 1e-6).transpose(0, 2, 1, 3).reshape(B, L, H * D) * mx.sigmoid(gate)
    run = partial(upstream.kernels.rms_norm_sigmoid_gate, x, gate, eps=1e-6)
    return Case(lambda: [run()], [out], [bound(D, 1) * mx.abs(out)])


# ---- kernels of other mlx_lm models


@case("wkv7")
def wkv7(upstream):
    B, T, H, D = 2, 5, 3, 64
    module = upstream.load("models/rwkv7")
    r, k, v = (normal(B, T, H, D) / 8 for _ in "rkv")
    a, b = (normal(B, T, H, D) / 8 for _ in "ab")
    w, state = mx.random.uniform(0.5, 1, (B, T, H, D)), normal(B, H, D, D)
    expected, ys = state, []
    for t in range(T):
        y, expected = module._wkv7_step_ops(*(x[:, t] for x in (r, w, k, v, a, b)), expected)
        ys.append(y[..., 0])
    run = partial(module.wkv7_kernel, r, w, k, v, a, b, state)
    length = mx.max(mx.linalg.norm(mx.stack([state, expected]), axis=-1)).item()
    # Vectors of about unit length: absolute terms stay below a few state rows' length.
    tolerance = bound(T * (D + 4), 4 * length)
    return Case(lambda: list(run()), [mx.stack(ys, axis=1), expected], [tolerance] * 2)


@case("ssm")
def ssm(upstream):
    module = upstream.load("models/ssm")
    n, h, d, groups, ds = 2, 4, 24, 2, 64
    x, B, C = normal(n, 1, h, d), normal(n, 1, groups, ds), normal(n, 1, groups, ds)
    A_log, D, dt, bias = normal(h), normal(h), normal(n, 1, h), normal(h)
    state = normal(n, h, d, ds)
    run = partial(module.ssm_update_kernel, x, A_log, B, C, D, dt, bias, state, (0.001, 100.0))
    step = module.compute_dt(dt, bias, (0.001, 100.0)).reshape(n, h, 1, 1)
    B, C = (mx.repeat(m.reshape(n, groups, 1, ds), h // groups, axis=1) for m in (B, C))
    decay = mx.exp(-mx.exp(A_log).reshape(1, h, 1, 1) * step)
    new = decay * state + x.reshape(n, h, d, 1) * step * B
    skip = x.reshape(n, h, d) * D.reshape(1, h, 1)
    out = (new * C).sum(axis=-1) + skip
    # The decay's exponent is a product, whose error goes in as a factor.
    exponent = mx.max(mx.exp(A_log).reshape(1, h, 1, 1) * step).item()
    size = mx.abs(state) + mx.abs(x.reshape(n, h, d, 1) * step * B)
    slack = bound(ds, 1) + bound(4, exponent)
    tolerance = slack * ((size * mx.abs(C)).sum(axis=-1) + mx.abs(skip))
    return Case(lambda: list(run()), [out[:, None], new], [tolerance[:, None], slack * size])


@case("bitlinear_matmul")
def bitlinear(upstream):
    layer = upstream.load("models/bitlinear_layers").BitLinear(128, 24, bias=False)
    layer.weight = mx.random.randint(0, 256, layer.weight.shape).astype(mx.uint8)
    # Two bits a weight; the value 3 does not occur in a checkpoint, and means 2 to the kernel.
    parts = [((layer.weight >> shift) & 3).astype(mx.float32) - 1 for shift in (0, 2, 4, 6)]
    weight, x = mx.concatenate(parts), normal(3, 128)
    tolerance = bound(128, mx.abs(x) @ mx.abs(weight.T))
    return Case(lambda: [layer(x)], [x @ weight.T], [tolerance])


def kl_forward(upstream, repair: bool) -> Case:
    """mlx_lm's KL divergence over rows of logits, as shipped or with its barriers repaired.

    It writes sums over the maxima in its array `shared` with no barrier after the reads of the
    maxima, and passes the last sums over a barrier that orders no memory.
    """
    losses = upstream.load("tuner/losses")
    losses.can_run_metal = lambda: True
    plain = mx.fast.metal_kernel

    def repaired(*, source: str, **options):
        barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
        place = "// Share the sum_exp across the threadgroup"
        assert source.count(place) == 1
        source = source.replace("threadgroup_barrier(mem_flags::mem_none);", barrier)
        return plain(source=source.replace(place, barrier), **options)

    with mock.patch.object(mx.fast, "metal_kernel", repaired if repair else plain):
        kernel = losses._make_kl_forward_kernel()
    q, p = normal(2, 5000), normal(2, 5000)
    run = partial(
        kernel,
        inputs=[q, p],
        output_shapes=[(2,)],
        output_dtypes=[mx.float32],
        template=[("T", mx.float32), ("V", 5000)],
        grid=(1024, 2, 1),
        threadgroup=(1024, 1, 1),
    )
    log_q, log_p = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
    terms = mx.exp(log_p) * (log_p - log_q)
    # Each factor takes the error of its own log sum.
    tolerance = bound(5000, mx.abs(terms).sum(axis=-1)) + bound(5000, 1)
    return Case(run, [terms.sum(axis=-1)], [tolerance])


case("kl_forward, repaired")(partial(kl_forward, repair=True))
