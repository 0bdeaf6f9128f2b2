"""The tokens are mlx_lm's. bench/parity.py is the same at full length."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest

import lily_mlx
from bench import parity


@pytest.mark.parametrize(
    ("dtype", "prompts", "tokens"), [("float32", 3, 24), ("bfloat16", 2, 6)], ids=str
)
def test_tokens_are_identical(dtype, prompts, tokens):
    model, tokenizer = mlx_lm.load(str(lily_mlx.embedded_checkpoint()))
    model.set_dtype(getattr(mx, dtype))
    rows = list(parity.compare(model, tokenizer.encode, prompts, tokens))
    assert len(rows) == 2 * (len(parity.OPTIONS) + len(parity.BATCH_OPTIONS))
    for row in rows:
        assert row["identical"] == prompts and row["tokens"] == prompts * tokens, row
