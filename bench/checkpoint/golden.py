"""Golden logits of the shipped checkpoint, by transformers' torch implementation in fp32.

    python bench/checkpoint/golden.py --out tests/data/golden.npz

The 4-bit weights are dequantized in fp32 and put back into torch's layout, so that this is the
same checkpoint run by someone else's code. For every position it keeps the 32 largest logits and
the log-sum-exp of all; for the last position of each prompt, all. Prints how far mlx_lm and
lily_mlx are from them here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from arch import TEXT_CONFIG, text_config
from compare import errors
from mlx_lm import load
from mlx_lm.utils import load_config
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM

import lily_mlx

TOP = 32
PROMPTS = (
    "Once upon a time there was a poor woodcutter who lived with his wife and two children near a "
    "great forest. One evening, when the snow lay deep, an old man knocked at the door and said",
    "The captain looked long at the sea, and then at the mate. 'We shall have wind before night,' "
    "he said; and he was right, for at six o'clock 1,2,3 -- Ünïcode 漢字!",
    "<|im_start|>user\nTell me a story about a fox and a crow.<|im_end|>\n<|im_start|>assistant\n"
    "A crow sat upon the branch of a tree with a piece of cheese in her beak, when",
)


def torch_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights in fp32, with transformers' names and layout."""
    packed = mx.load(str(folder / "model.safetensors"))
    quantization = load_config(folder)["quantization"]
    dense = {}
    for name, value in packed.items():
        stem = name.rpartition(".")[0]
        if name.endswith((".scales", ".biases")):
            continue
        if f"{stem}.scales" in packed:
            how = quantization.get(stem, quantization)
            scales, biases = (
                packed[f"{stem}.{n}"].astype(mx.float32) for n in ("scales", "biases")
            )
            value = mx.dequantize(value, scales, biases, how["group_size"], how["bits"])
        value = value.astype(mx.float32)
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(2, 1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            value = value - 1.0  # torch's are centred on zero
        dense[name.removeprefix("language_model.")] = value
    for layer in range(TEXT_CONFIG["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.switch_mlp"
        gate, up, down = (dense.pop(f"{experts}.{n}_proj.weight") for n in ("gate", "up", "down"))
        experts = experts.replace("switch_mlp", "experts")
        dense[f"{experts}.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        dense[f"{experts}.down_proj"] = down
    return {name: torch.from_numpy(np.array(value)) for name, value in dense.items()}


def report(folder: Path, golden: Mapping[str, np.ndarray]) -> None:
    """Print the differences of mlx_lm and lily_mlx from the golden logits, in fp32 and bf16."""
    for dtype in (mx.float32, mx.bfloat16):
        model, _ = load(str(folder))
        if dtype == mx.float32:
            model.set_dtype(dtype)
        for name, change in (("mlx_lm", None), ("lily_mlx", lily_mlx.accelerate)):
            if change:
                print(change(model))
            for way, stepwise in (("whole prompt", False), ("token by token", True)):
                rms, largest = errors(golden, model, stepwise)
                print(f"{name}, {dtype}, {way}: rms {rms:.2e}, largest {largest:.2e}")


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = lily_mlx.embedded_checkpoint()
    config = text_config()
    config._attn_implementation = "eager"
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    model.load_state_dict(torch_weights(folder), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        top = logits.topk(TOP, dim=-1)
        arrays |= {
            f"ids{i}": ids[0].numpy().astype(np.int32),
            f"top_ids{i}": top.indices.numpy().astype(np.int16),
            f"top_logits{i}": top.values.numpy(),
            f"logsumexp{i}": logits.logsumexp(-1).numpy(),
            f"last{i}": logits[-1].numpy(),
        }
        print(f"{ids.shape[1]} tokens; likeliest next: {tokenizer.decode(top.indices[-1, 0])!r}")
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    report(folder, np.load(args.out))


if __name__ == "__main__":
    main()
