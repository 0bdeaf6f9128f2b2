"""A model's logits against the golden ones (`golden.py` makes them, from transformers in fp32)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np


def logits_of(model: nn.Module, ids: np.ndarray, stepwise: bool) -> np.ndarray:
    """(L, vocabulary) fp32 logits of ids (L,): the prompt at once, or token by token with a cache.

    One at a time is what runs the decode path of fused layers.
    """
    tokens = mx.array(ids)[None]
    if stepwise:
        cache = model.make_cache()
        steps = []
        for i in range(tokens.shape[1]):
            steps.append(model(tokens[:, i : i + 1], cache=cache))
            mx.eval(steps[-1])
        out = mx.concatenate(steps, axis=1)
    else:
        out = model(tokens)
    return np.array(out[0].astype(mx.float32))


def errors(
    golden: Mapping[str, np.ndarray], model: nn.Module, stepwise: bool, length: int | None = None
) -> tuple[float, float]:
    """(rms, largest) difference over every stored logit and log-sum-exp of all the prompts.

    `length` cuts each prompt to its first tokens. Not-a-numbers come out as such.
    """
    differences = []
    for i in range(sum(name.startswith("ids") for name in golden)):
        ids = golden[f"ids{i}"][:length]
        logits = logits_of(model, ids, stepwise).astype(np.float64)
        kept = np.take_along_axis(logits, golden[f"top_ids{i}"][: len(ids)].astype(int), axis=-1)
        differences.append(kept - golden[f"top_logits{i}"][: len(ids)])
        logsumexp = np.log(np.exp(logits).sum(-1))
        differences.append(logsumexp - golden[f"logsumexp{i}"][: len(ids)])
        if len(ids) == len(golden[f"ids{i}"]):
            differences.append(logits[-1] - golden[f"last{i}"])
    flat = np.concatenate([d.ravel() for d in differences])
    return float(np.sqrt(np.mean(flat**2))), float(np.abs(flat).max())
