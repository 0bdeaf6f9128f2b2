"""Attention kernels where MLX's own fp32 is no measure: far positions, cache buffers, strides."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from backend_cases import each_backend, fresh_key, running

from lily_mlx.ops import attention


@each_backend
@pytest.mark.parametrize("offset", [4095, 262143])
def test_far_positions(backend, offset):
    """Against float64: as far off as fp32's angle is, which MLX computes too.

    The exponent of a frequency, -log2(base) * turn, has 3 roundings, each worth log(base) * turn
    as a relative error of the angle; exp2, the product and the reduction by 2 pi have 4 more.
    """
    D, rotary, base, eps = 128, 64, 1e7, 1e-6
    proj, q_norm, k_norm, *_ = attention.attn_prep.inputs(
        fresh_key(), mx.float32, D, 2, 1, rotary, False, lead=(1, 2)
    )
    with running(backend):
        q, k, _ = attention.attn_prep.launch(
            proj, q_norm, k_norm, mx.array([offset]), (2, 1), rotary, base, eps, False
        )
        got = np.array(mx.concatenate([q, k], axis=1))[0]
    x = np.array(proj, np.float64).reshape(2, 4, D).transpose(1, 0, 2)[:3]
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    x *= np.stack([np.array(w, np.float64) for w in (q_norm, q_norm, k_norm)])[:, None]
    turn = np.arange(rotary // 2) / (rotary // 2)
    angle = (offset + np.arange(2))[:, None] * base**-turn
    low, high = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    c, s = np.cos(angle), np.sin(angle)
    want = np.concatenate([low * c - high * s, low * s + high * c, x[..., rotary:]], axis=-1)
    ulp = 2.0**-24
    turned = np.hypot(low, high) * angle * (4 + 3 * math.log(base) * turn) * ulp
    allowed = np.concatenate([turned, turned, 0 * x[..., rotary:]], axis=-1)
    assert np.all(np.abs(got - want) <= allowed + 16 * ulp * np.abs(x).max())
    assert np.all(np.abs(got[..., 1] - want[..., 1]) < 0.1)  # a bound above this would say nothing


@each_backend
def test_nothing_behind_the_length_is_read(backend):
    """A cache's buffer, NaN from each batch's length on, as that batch alone."""
    B, S, variant = 2, 100, (mx.float32, 64, 2, 3, 2, True)
    q, k, v, scale, gate, lengths = attention.attn_decode.inputs(
        fresh_key(), *variant, B=B, S=S, ragged=True
    )
    behind = (mx.arange(S) >= lengths[:, None])[:, None, :, None]
    k, v = (mx.where(behind, mx.nan, a) for a in (k, v))
    with running(backend):
        got = attention.attn_decode.launch(q, k, v, scale, gate, lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = (a[b : b + 1] for a in (q, k[:, :, :n], v[:, :, :n]))
        want = attention.attn_decode.reference(*alone, scale, gate[b : b + 1])
        assert mx.allclose(got[b : b + 1], want, rtol=1e-5, atol=1e-5)


@each_backend
def test_any_strides(backend):
    """Heads last, as a projection leaves them, and positions with others between them."""
    variant = (mx.float32, 64, 2, 2, 2, False)
    q, k, v, scale, *_ = attention.attn_decode.inputs(fresh_key(), *variant, B=2, S=44)
    want = attention.attn_decode.reference(q, k, v, scale)
    q = mx.contiguous(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    k = mx.contiguous(k.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
    v = mx.contiguous(mx.repeat(v, 3, axis=2))[:, :, 1::3]
    with running(backend):
        got = attention.attn_decode.launch(q, k, v, scale, None, mx.array([44]))
    assert mx.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"q": (1, 4, 1, 48)},
        {"q": (1, 4, 9, 64)},
        {"q": (1, 5, 1, 64)},
        {"k": (1, 2, 7, 32)},
        {"lengths": (2,)},
        {"gate": (1, 1, 511)},
    ],
    ids=str,
)
def test_other_shapes_are_not_the_kernels(change):
    shapes = {"q": (1, 4, 1, 64), "k": (1, 2, 8, 64), "v": (1, 2, 8, 64), "gate": (1, 1, 512)}
    args = {n: mx.zeros(s) for n, s in (shapes | change).items()}
    args["lengths"] = args["lengths"].astype(mx.int32) if "lengths" in change else None
    assert attention.attn_decode.variant(**args, scale=1.0) is None
