"""Are lily_mlx's tokens mlx_lm's? Every way of generating, on one set of weights.

    python bench/parity.py --dtype float32 --json parity.json

Each row generates with mlx_lm's layers, then with the fused ones, from the same prompts, caches and
seeds, past any end-of-text token. On a CPU both must give the same tokens, all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_sampler

import lily_mlx

PROMPTS = (
    "hello",
    "Tell me a story about a fox and a crow.",
    "Once upon a time",
    "The captain looked at the sea and said",
    "Who is the king?",
    "Write about a garden in winter.",
    "Why did she leave the house so early?",
    "A letter arrived in the morning",
    "Describe the castle on the hill.",
    "It was a dark night, and the old soldier",
    "What is the moon?",
    "There were three brothers",
    "She smiled, and",
    "Tell me what happened to the doctor.",
    "My dear sister,",
    "An honest man is",
    "The ship had been three days out of port when the wind fell",
    "1, 2, 3, 4,",
    "Ünïcode — 漢字 🙂",
    "a",
)
SAMPLING = {"temp": 0.8, "top_p": 0.95, "min_p": 0.02, "top_k": 50}
OPTIONS = ("none", "--kv-bits 8", "--kv-bits 4", "--max-kv-size 64", "prompt cache file")
BATCH_OPTIONS = ("none", "prompt cache file")  # mlx_lm's batches know no others
PREFIX = "You are a teller of tales. Answer in plain words."
BATCH = 5


def single(
    model: nn.Module, prompts: list[list[int]], count: int, option: str, sampled: bool, file: Path
) -> list[list[int]]:
    """Tokens of each prompt on its own."""
    name, _, value = option.partition(" ")
    kwargs = {}
    if name == "--kv-bits":
        kwargs = {"kv_bits": int(value), "quantized_kv_start": 8}
    elif name == "--max-kv-size":
        kwargs = {"max_kv_size": int(value)}
    rows = []
    for index, prompt in enumerate(prompts):
        mx.random.seed(index)
        if name == "prompt":
            kwargs = {"prompt_cache": load_prompt_cache(str(file))}
        sampler = make_sampler(**SAMPLING) if sampled else None
        steps = generate_step(mx.array(prompt), model, max_tokens=count, sampler=sampler, **kwargs)
        rows.append([token for token, _ in steps])
    return rows


def batch(
    model: nn.Module, prompts: list[list[int]], count: int, option: str, sampled: bool, file: Path
) -> list[list[int]]:
    """Tokens of the prompts in batches of unequal lengths."""
    endless = SimpleNamespace(eos_token_ids=(), decode=lambda ids: "")
    rows = []
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        mx.random.seed(start)
        caches = [load_prompt_cache(str(file)) for _ in some] if option != "none" else None
        kwargs = {"sampler": make_sampler(**SAMPLING)} if sampled else {}
        rows += batch_generate(
            model,
            endless,
            some,
            prompt_caches=caches,
            max_tokens=count,
            return_token_ids=True,
            **kwargs,
        ).token_ids
    return rows


def compare(
    model: nn.Module, encode: Callable[[str], list[int]], prompts: int, tokens: int
) -> Iterator[dict]:
    """One row a way of generating: {mode, option, prompts, tokens, identical}.

    `identical` counts prompts whose tokens all agree. The model comes back with mlx_lm's layers.
    """
    ids = [encode(text) for text in PROMPTS[:prompts]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefix.safetensors"
        lily_mlx.restore(model)
        cache = make_prompt_cache(model)
        model(mx.array(encode(PREFIX))[None], cache=cache)
        save_prompt_cache(str(file), cache)
        modes = [("greedy", single, False), ("sampled", single, True)]
        modes += [("batch", batch, False), ("sampled batch", batch, True)]
        for mode, run, sampled in modes:
            for option in OPTIONS if run is single else BATCH_OPTIONS:
                lily_mlx.restore(model)
                theirs = run(model, ids, tokens, option, sampled, file)
                if not lily_mlx.accelerate(model).fused:
                    raise SystemExit("parity: nothing was fused, so there is nothing to compare")
                ours = run(model, ids, tokens, option, sampled, file)
                lily_mlx.restore(model)
                same = [a == b for a, b in zip(ours, theirs, strict=True)]
                yield {
                    "mode": mode,
                    "option": option,
                    "prompts": len(ids),
                    "tokens": sum(map(len, theirs)),
                    "identical": sum(same),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(lily_mlx.embedded_checkpoint()))
    parser.add_argument("--dtype", help="cast the model first, e.g. float32")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = mlx_lm.load(args.model)
    if args.dtype:
        model.set_dtype(getattr(mx, args.dtype))
    rows = []
    for row in compare(model, tokenizer.encode, args.prompts, args.tokens):
        rows.append(row)
        print("{mode:14} {option:18} {identical}/{prompts} prompts, {tokens} tokens".format(**row))
        sys.stdout.flush()
        if args.json:
            args.json.write_text(json.dumps({"dtype": args.dtype, "rows": rows}, indent=1) + "\n")
    if any(row["identical"] < row["prompts"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
