"""Train the embedded checkpoint on the packed corpus.

    python3 bench/checkpoint/train.py --data .train --out OUT

The schedule runs over training time, not steps. The last part trains with weights quantized as
they will ship. OUT gets the weights of the best held-out perplexity *after* quantization, in
three safetensors files, with ``log.jsonl`` and ``samples.txt``. A run that stops short
(``--wall``) leaves its state in ``--state``, and the same command with ``--resume`` goes on.
"""

import argparse
import json
import math
import time
from pathlib import Path

import arch
import numpy as np
import torch
import torch.nn.functional as F
from quantization import Quantized
from safetensors.torch import save_file
from tokenizers import Tokenizer
from vocabulary import TURN_START, turn

LENGTH, QAT_FROM, EVALUATIONS, RESERVE = 512, 0.8, 24, 30.0
PLAIN = ("Once upon a time there was a king who had three daughters,", "Elizabeth looked up, and")
CHATS = ("hello", "Tell me a story about a wolf.")


def batch(data: dict, rows: int, rng: np.random.Generator, device: str) -> torch.Tensor:
    """Token ids [rows, LENGTH + 1]: 70 % prose windows at random offsets, 30 % chat rows."""
    chats = round(0.3 * rows)
    starts = rng.integers(0, len(data["train"]) - LENGTH - 1, rows - chats)
    prose = np.stack([data["train"][s : s + LENGTH + 1] for s in starts])
    chat = data["chat"][rng.integers(0, len(data["chat"]), chats)]
    ids = torch.from_numpy(np.concatenate((prose, chat)).astype(np.int64))
    return ids.pin_memory().to(device, non_blocking=True) if device == "cuda" else ids


def losses(model, mtp, ids, rope, dropout, layer):
    """(next-token loss, MTP loss, balance loss) of ids [B, T + 1]."""
    main, ahead, balance = arch.forward(model, mtp, ids[:, :-1], rope, dropout, layer)
    ce = F.cross_entropy(main.float().flatten(0, 1), ids[:, 1:].flatten())
    ce_ahead = F.cross_entropy(ahead.float().flatten(0, 1), ids[:, 2:].flatten())
    return ce, ce_ahead, balance


@torch.no_grad()
def evaluate(model, mtp, stream: np.ndarray, rope, device: str) -> dict:
    """Held-out perplexity over consecutive windows, and how often the MTP agrees greedily."""
    count = (len(stream) - 1) // LENGTH
    windows = np.stack([stream[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])
    total, agree, drafts = 0.0, 0, 0
    for part in np.array_split(windows.astype(np.int64), math.ceil(count / 32)):
        ids = torch.from_numpy(part).to(device)
        with torch.autocast(device, torch.bfloat16):
            main, ahead, _ = arch.forward(model, mtp, ids[:, :-1], rope)
        loss = F.cross_entropy(main.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        total += loss.item()
        agree += (main[:, 1:].argmax(-1) == ahead.argmax(-1)).sum().item()
        drafts += ahead.shape[0] * ahead.shape[1]
    return {"ppl": math.exp(total / (count * LENGTH)), "mtp_agreement": agree / drafts}


@torch.no_grad()
def generate(model, mtp, tokenizer: Tokenizer, device: str, tokens: int) -> str:
    """Samples at temperature 0.7, plain and in chat form."""
    prompts = [*PLAIN, *(turn("user", c) + f"{TURN_START}assistant\n" for c in CHATS)]
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    stop = {arch.TOKEN_ID[t] for t in ("<|endoftext|>", "<|im_end|>")}
    done = [False] * len(rows)
    rope = arch.rope_table(model, max(map(len, rows)) + tokens)
    torch.manual_seed(0)
    for _ in range(tokens):
        width = max(map(len, rows))  # causal: padding on the right changes nothing before it
        ids = torch.tensor([r + [0] * (width - len(r)) for r in rows], device=device)
        with torch.autocast(device, torch.bfloat16):
            logits, _, _ = arch.forward(model, mtp, ids, tuple(r[:, :width] for r in rope))
        for i, row in enumerate(rows):
            if not done[i]:
                probs = (logits[i, len(row) - 1].float() / 0.7).softmax(-1)
                row.append(torch.multinomial(probs, 1).item())
                done[i] = row[-1] in stop
    return "\n=====\n".join(tokenizer.decode(r, skip_special_tokens=False) for r in rows) + "\n"


def save(model, mtp, out: Path) -> None:
    """Weights as three safetensors files under 16 MiB: matrices in bf16, vectors in fp32."""
    named = [*model.named_parameters(), *((f"mtp.{n}", p) for n, p in mtp.named_parameters())]
    parts, size = [{}], 0
    for name, p in named:
        tensor = p.detach().to("cpu", torch.bfloat16 if p.ndim > 1 else torch.float32).clone()
        if size + tensor.nbytes > 13 * 2**20:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    for i, part in enumerate(parts):
        save_file(part, str(out / f"trained-{i}.safetensors"))


def main() -> None:
    """Command line."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190, help="training time of the schedule")
    parser.add_argument("--wall", type=float, default=585, help="wall-clock limit of this process")
    parser.add_argument("--rows", type=int, default=64, help=f"sequences of {LENGTH} a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.3, help="weight decay")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--state", type=Path, default=Path.home() / "lily_train_state.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    data = {k: np.load(args.data / f"{k}.npy") for k in ("train", "heldout", "chat")}
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    model, mtp = arch.build()
    model, mtp = model.to(device), mtp.to(device)
    model.train(), mtp.train()
    parameters = [p for m in (model, mtp) for p in m.parameters()]
    print(
        f"parameters: {sum(p.numel() for p in model.parameters())} + MTP "
        f"{sum(p.numel() for p in mtp.parameters())}; on {device}; "
        f"forward differs from transformers by {arch.check_forward(model, mtp):.1e}"
    )
    torch.set_float32_matmul_precision("high")
    decayed = [p for p in parameters if p.ndim in (2, 3) and 1 not in p.shape[1:]]
    seen = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": args.decay},
        {"params": [p for p in parameters if id(p) not in seen], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device == "cuda")
    rope = arch.rope_table(model, LENGTH)
    quantized = Quantized(model, mtp)
    layer = arch.layer if args.eager else torch.compile(arch.layer, dynamic=False)
    rng, step, elapsed, best, evaluated = np.random.default_rng(0), 0, 0.0, math.inf, 0
    if args.resume:
        state = torch.load(args.state, map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        mtp.load_state_dict(state["mtp"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed, best, evaluated = (
            state[k] for k in ("step", "elapsed", "best", "evaluated")
        )
        rng = np.random.default_rng(step)
    log = (args.out / "log.jsonl").open("a")

    def train_step(rate: float, qat: bool) -> tuple[float, ...]:
        ids = batch(data, args.rows, rng, device)
        if qat:
            quantized.__enter__()
        with torch.autocast(device, torch.bfloat16):
            ce, ahead, balance = losses(model, mtp, ids, rope, args.dropout, layer)
        (ce + 0.3 * ahead + arch.TEXT_CONFIG["router_aux_loss_coef"] * balance).backward()
        if qat:
            quantized.__exit__()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ce.detach(), ahead.detach(), balance.detach()

    def store() -> None:
        torch.save({"model": model.state_dict(), "mtp": mtp.state_dict(), "step": step,
                    "optimizer": optimizer.state_dict(), "elapsed": elapsed, "best": best,
                    "evaluated": evaluated}, args.state)  # fmt: skip

    train_step(0.0, False)  # compiles, outside the schedule's clock
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    clock, stopped = time.monotonic() - elapsed, False
    while elapsed < args.seconds and not stopped:
        progress = elapsed / args.seconds
        warm = min(1.0, (step + 1) / 200)
        rate = args.rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        ce, ahead, balance = train_step(rate, progress >= QAT_FROM)
        step += 1
        if step % 20 == 0:
            ce = ce.item()  # waits for the device, so that the clock is of work done
        elapsed = time.monotonic() - clock
        stopped = time.monotonic() - started > args.wall - RESERVE
        if elapsed / args.seconds * EVALUATIONS >= evaluated + 1 or stopped:
            evaluated = int(elapsed / args.seconds * EVALUATIONS)
            plain = evaluate(model, mtp, data["heldout"], rope, device)
            with quantized:
                four_bit = evaluate(model, mtp, data["heldout"], rope, device)
            record = {"step": step, "seconds": round(elapsed, 1),
                      "tokens": step * args.rows * LENGTH,
                      "rate": rate, "loss": float(ce), "mtp_loss": float(ahead),
                      "balance": float(balance), "ppl": plain["ppl"], "ppl_4bit": four_bit["ppl"],
                      "mtp_agreement": four_bit["mtp_agreement"]}  # fmt: skip
            print(json.dumps(record), flush=True)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if four_bit["ppl"] < best:
                best = four_bit["ppl"]
                save(model, mtp, args.out)
            if stopped or evaluated in (EVALUATIONS * 6 // 10, EVALUATIONS * 85 // 100):
                store()
    with quantized:
        samples = generate(model, mtp, tokenizer, device, 120)
    (args.out / "samples.txt").write_text(samples)
    print(samples)
    print(
        "stopped by --wall; go on with --resume" if stopped else f"done; best 4-bit ppl {best:.3f}"
    )


if __name__ == "__main__":
    main()
