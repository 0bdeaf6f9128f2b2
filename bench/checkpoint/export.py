"""Trained weights to the shipped folder, the way users' models go: Hugging Face, mlx_lm.convert.

    python bench/checkpoint/export.py --trained OUT --data .train --out lily_mlx/checkpoint

Writes the converted model, the MTP layer beside it (`mlx_lm.convert` drops it) and `card.md` with
what is measured here. Nothing is written unless transformers reads the Hugging Face folder whole,
the shipped weights have the perplexity that the trainer's own forward gives on the same windows,
and the MTP layer predicts what the model goes on to say.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from arch import TEXT_CONFIG, TOKEN_ID, build, forward, rope_table
from mlx.utils import tree_flatten
from mlx_lm import convert, load
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs
from quantization import Quantized
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vocabulary import CHAT_TEMPLATE, END_OF_TEXT, TURN_END

LIMIT = 12_000_000
WINDOW = 512
BATCH = 8
EVERY = 5  # MLX's CPU build takes 5 s a window, so mlx_lm is given every fifth
# The trainer's 4-bit rounding is MLX's, up to norms and vectors in bf16: seen 0.05 % in perplexity.
TOLERANCE = 0.005
AGREEMENT = 0.5  # the trainer saw 0.61; a wrong name, norm or order gives next to none
LOG = Path(__file__).with_name("log.jsonl")
TRAINING = "python3 bench/checkpoint/train.py --data .train --out OUT --seconds 190 --dropout 0.2"
NORMS = "Norm weights multiply as they stand (MLX's convention: torch's zero-centred weight + 1)."
QUANTIZATION = {"group_size": 64, "bits": 4}
SHIPPED = ("config.json", "generation_config.json", "model.safetensors", "mtp.safetensors",
           "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "card.md")  # fmt: skip


class MTP(nn.Module):
    """The multi-token-prediction layer, with the names of its file.

    From the model's final normed hidden state at t and the embedding of token t+1, it gives a
    hidden state that the model's `lm_head` turns into logits of token t+2.
    """

    def __init__(self, args: TextModelArgs):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.layers = [DecoderLayer(args, layer_idx=args.full_attention_interval - 1)]
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        """hidden (B, L, D) at t, embedded (B, L, D) of t+1; returns (B, L, D)."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(mx.concatenate(both, axis=-1)), mask="causal"))


def hugging_face(trained: Path, tokenizer: Path, folder: Path) -> None:
    """The trained shards as a Hugging Face folder, named as the Qwen3.6 checkpoints name theirs."""
    weights = {}
    for shard in sorted(trained.glob("trained-*.safetensors")):
        for name, value in mx.load(str(shard)).items():
            if name.startswith("model."):
                name = name.replace("model.", "model.language_model.", 1)
            weights[name] = value if name.endswith("A_log") else value.astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": TEXT_CONFIG | {"dtype": "bfloat16"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {
        "bos_token_id": TOKEN_ID[END_OF_TEXT],
        "eos_token_id": [TOKEN_ID[TURN_END], TOKEN_ID[END_OF_TEXT]],
        "pad_token_id": TOKEN_ID[END_OF_TEXT],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    shutil.copy(tokenizer, folder / "tokenizer.json")
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens, indent=1))


def mtp_layer(folder: Path, model: nn.Module) -> MTP:
    """The MTP layer of a Hugging Face folder in MLX's layout, quantized as the model is."""
    text = model.language_model
    weights = {}
    for name, value in mx.load(str(folder / "model.safetensors")).items():
        if not name.startswith("mtp."):
            continue
        name = name.removeprefix("mtp.")
        if "norm" in name:
            value = value + 1.0  # torch's are centred on zero
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            gate, up = mx.split(value, 2, axis=1)
            weights |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            weights[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
        else:
            weights[name] = value
    mtp = MTP(text.args)
    mtp.load_weights(list(weights.items()))
    predicate = model.quant_predicate
    nn.quantize(
        mtp,
        **QUANTIZATION,
        class_predicate=lambda p, m: hasattr(m, "to_quantized") and predicate(p, m),
    )
    mtp.eval()
    return mtp


def windows_of(stream: np.ndarray) -> np.ndarray:
    """(windows, WINDOW + 1) int64: the whole windows; the end of one starts the next."""
    count = (len(stream) - 1) // WINDOW
    return np.stack([stream[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(count)]).astype(int)


def read_whole(folder: Path) -> int:
    """Parameters of the Hugging Face folder's model as transformers reads it.

    Raises SystemExit if transformers misses a tensor or has no place for one (`mtp.*` aside, which
    it leaves out by design).
    """
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found[kind]:
            raise SystemExit(f"transformers, {kind}: {sorted(map(str, found[kind]))[:4]}")
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def trainer_losses(trained: Path, windows: np.ndarray) -> np.ndarray:
    """(windows,) mean loss of each in nats a token: the trainer's forward, 4-bit weights, fp32."""
    model, mtp = build()
    weights = {}
    for shard in sorted(trained.glob("trained-*.safetensors")):
        weights |= load_file(shard)
    ahead = {n.removeprefix("mtp."): weights.pop(n) for n in list(weights) if n.startswith("mtp.")}
    model.load_state_dict(weights, strict=True)
    mtp.load_state_dict(ahead, strict=True)
    rope, losses = rope_table(model, WINDOW), []
    with Quantized(model, mtp):
        for ids in torch.from_numpy(windows).split(BATCH):
            logits = forward(model, mtp, ids[:, :-1], rope)[0]
            loss = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
            losses.append(loss.mean(1))
    return torch.cat(losses).double().numpy()


def measure(model: nn.Module, mtp: MTP, windows: np.ndarray) -> tuple[float, float]:
    """(perplexity, share of tokens the MTP layer agrees on) of windows on their own, by mlx_lm."""
    text = model.language_model
    loss, agree, drafts = 0.0, 0, 0
    for rows in np.array_split(windows, math.ceil(len(windows) / BATCH)):
        ids = mx.array(rows)
        hidden = text.model(ids[:, :-1])
        logits = text.lm_head(hidden)
        loss += nn.losses.cross_entropy(logits, ids[:, 1:]).sum().item()
        ahead = text.lm_head(mtp(hidden[:, :-1], text.model.embed_tokens(ids[:, 1:-1])))
        agree += (ahead.argmax(-1) == logits[:, 1:].argmax(-1)).sum().item()
        drafts += ids.shape[0] * (WINDOW - 1)
        mx.clear_cache()
    return math.exp(loss / (len(windows) * WINDOW)), agree / drafts


def card(data: Path, log: Path, figures: dict[str, float]) -> str:
    """The text of card.md: what the model is, and what was measured."""
    corpus = json.loads((data / "corpus.json").read_text())
    sources = ", ".join(f"{s['name']} {s['version']}" for s in corpus["sources"])
    records = [json.loads(line) for line in log.read_text().splitlines()]
    last, best = records[-1], min(records, key=lambda r: r["ppl_4bit"])
    return f"""# The embedded model

`qwen3_5_moe` of {figures["parameters"]:,} parameters, and an MTP layer of {figures["mtp"]:,},
trained from nothing for lily_mlx; MIT licence. English prose out of copyright, of the 19th and
early 20th century: it reflects the attitudes of its time, knows nothing else, and tells stories,
not facts.

- Corpus, as packages: {sources}.
  The training split has {corpus["train"]["tokens"]:,} tokens.
- Training: `{TRAINING}` on one H200;
  {last["tokens"]:,} tokens in {last["step"]:,} steps, {last["seconds"]:.0f} s. Its log is
  `bench/checkpoint/log.jsonl`.
- Weights: affine 4-bit, group 64 (router and shared-expert gate 8-bit), by `mlx_lm.convert`.
- Held-out perplexity, per token of a vocabulary of 4,096, windows of {WINDOW}: these files by
  mlx_lm, fp32 arithmetic, on every {EVERY}th window ({figures["tokens"]:,} tokens),
  {figures["ppl"]:.2f}; the trainer's forward with its 4-bit weights on the same windows,
  {figures["trainer"]:.2f}, on all ({figures["all_tokens"]:,} tokens) {figures["trainer_all"]:.2f};
  {best["ppl_4bit"]:.2f} in the training log, in bf16.
- `mtp.safetensors`: the MTP layer, quantized the same, names as mlx_lm lays the model out
  (`mtp.layers.0.mlp.switch_mlp.gate_proj.weight`). {NORMS}
  From the model's normed hidden state at t and the embedding of t+1 it predicts t+2; its greedy
  token is the model's for {figures["agreement"]:.1%} of the same windows' tokens.
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    windows = windows_of(np.load(args.data / "heldout.npy"))
    some = windows[::EVERY]
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "hf", Path(temporary) / "mlx"
        source.mkdir()
        hugging_face(args.trained, args.data / "tokenizer.json", source)
        parameters = read_whole(source)
        convert(str(source), str(target), quantize=True, q_group_size=64, q_bits=4)
        model, _ = load(str(target))
        mtp = mtp_layer(source, model)
        weights = {f"mtp.{name}": value for name, value in tree_flatten(mtp.parameters())}
        metadata = {"format": "mlx", "norms": NORMS}
        mx.save_safetensors(str(target / "mtp.safetensors"), weights, metadata)
        mtp_parameters = sum(
            v.size for n, v in mx.load(str(source / "model.safetensors")).items() if "mtp." in n
        )
        losses = trainer_losses(args.trained, windows)
        model.set_dtype(mx.float32)
        mtp.set_dtype(mx.float32)
        ppl, agreement = measure(model, mtp, some)
        figures = {
            "parameters": parameters,
            "mtp": mtp_parameters,
            "tokens": some.shape[0] * WINDOW,
            "all_tokens": windows.shape[0] * WINDOW,
            "ppl": ppl,
            "trainer": math.exp(losses[::EVERY].mean()),
            "trainer_all": math.exp(losses.mean()),
            "agreement": agreement,
        }
        print(json.dumps(figures))
        if abs(math.log(ppl / figures["trainer"])) > TOLERANCE:
            raise SystemExit("the converted model is not the trained one: perplexities differ")
        if agreement < AGREEMENT:
            raise SystemExit("the MTP layer does not predict the model: wrong name, norm or order")
        (target / "card.md").write_text(card(args.data, LOG, figures))
        size = sum((target / name).stat().st_size for name in SHIPPED)
        if size > LIMIT:
            raise SystemExit(f"{size} bytes, more than {LIMIT}")
        args.out.mkdir(parents=True, exist_ok=True)
        for name in SHIPPED:
            shutil.copy(target / name, args.out / name)
    print(f"{size} bytes in {args.out}")


if __name__ == "__main__":
    main()
