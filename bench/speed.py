"""Prefill and decode speed of lily_mlx over mlx_lm, arms alternated on one set of weights.

    python bench/speed.py --prompt 512 --tokens 64 --rounds 5

Prints tokens per second of each round, the medians and their ratio. Arms swap order each round, so
that drift of the machine falls on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step

import lily_mlx

ARMS = {"mlx_lm": lily_mlx.restore, "lily_mlx": lily_mlx.accelerate}


def measure(model: nn.Module, prompt: mx.array, tokens: int) -> dict[str, float]:
    """Tokens per second of one generation: {"prefill", "decode"}."""
    start = time.perf_counter()
    steps = generate_step(prompt, model, max_tokens=tokens + 1)
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    end = time.perf_counter()
    return {"prefill": prompt.size / (first - start), "decode": tokens / (end - first)}


def alternate(model: nn.Module, prompt: mx.array, tokens: int, rounds: int) -> dict:
    """Medians and ratios of `rounds` rounds, after one round that is not counted.

    Returns: {"prefill": {"mlx_lm": tok/s, "lily_mlx": tok/s, "ratio": x}, "decode": ...}.
    """
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        for arm in list(ARMS)[:: 1 if number % 2 else -1]:
            ARMS[arm](model)
            run = measure(model, prompt, tokens)
            if number:
                runs[arm].append(run)
                print(f"{number} {arm:9}", *(f"{k} {v:8.2f} tok/s" for k, v in run.items()))
    result = {}
    for part in ("prefill", "decode"):
        medians = {arm: statistics.median(run[part] for run in runs[arm]) for arm in ARMS}
        result[part] = medians | {"ratio": medians["lily_mlx"] / medians["mlx_lm"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(lily_mlx.embedded_checkpoint()))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = mlx_lm.load(args.model)
    prompt = mx.random.randint(0, tokenizer.vocab_size, (args.prompt,))
    result = alternate(model, prompt, args.tokens, args.rounds)
    for part, row in result.items():
        print(f"{part}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
