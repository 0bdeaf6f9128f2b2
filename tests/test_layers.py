"""Every fused layer against the mlx_lm layer it replaces, at every number of rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from models import qwen3_5_moe_model

import lily_mlx

Q4 = {"group_size": 64, "bits": 4}


@pytest.fixture(scope="module", params=[mx.float32, mx.bfloat16], ids=str)
def pair(request):
    """(mlx_lm's model, the same accelerated)."""
    made = [qwen3_5_moe_model(dtype=request.param, quantization=Q4) for _ in range(2)]
    lily_mlx.accelerate(made[1])
    return [m.language_model.model.layers for m in made], request.param


@pytest.mark.parametrize("rows", [*range(1, 17), 33, 64])
@pytest.mark.parametrize("part", ["linear_attn", "self_attn", "mlp"])
def test_rows(pair, part, rows):
    """`rows` tokens, then one more on the cache they left, are bit for bit stock's."""
    (stock, fused), dtype = pair
    index = 3 if part == "self_attn" else 1
    x = mx.random.normal((1, rows + 1, 256)).astype(dtype)
    outputs = []
    for layers in (stock, fused):
        layer = layers[index][part]
        if part == "mlp":
            outputs.append([layer(x[:, :rows]), layer(x[:, rows:])])
            continue
        cache = KVCache() if part == "self_attn" else ArraysCache(size=2)
        mask = "causal" if part == "self_attn" and rows > 1 else None
        outputs.append([layer(x[:, :rows], mask, cache), layer(x[:, rows:], None, cache)])
        outputs[-1] += [s for s in cache.state if isinstance(s, mx.array)]
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        assert ours.dtype == theirs.dtype and mx.array_equal(ours, theirs)


@pytest.mark.parametrize("batch", [2, 5, 8, 9])
@pytest.mark.parametrize("part", ["linear_attn", "self_attn", "mlp"])
def test_batches(pair, part, batch):
    """A batch decodes each row as stock does, and without a cache too."""
    (stock, fused), dtype = pair
    index = 3 if part == "self_attn" else 1
    x = mx.random.normal((batch, 1, 256)).astype(dtype)
    ours, theirs = (layers[index][part](x) for layers in (fused, stock))
    assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("lengths", [False, True])
def test_padding_takes_stocks_path(pair, lengths):
    """Left padding is a mask, right padding lengths: both gate the conv window and the state."""
    (stock, fused), dtype = pair
    x = mx.random.normal((2, 4, 256)).astype(dtype)
    results = []
    for layers in (stock, fused):
        cache = ArraysCache(size=2)
        if lengths:
            cache.prepare(lengths=[2, 4])
            mask = cache.make_mask(4)
        else:
            mask = mx.array([[False, False, True, True], [True] * 4])
        out = layers[1].linear_attn(x, mask, cache)
        results.append([out, cache[0], cache[1]])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert mx.array_equal(ours, theirs)
