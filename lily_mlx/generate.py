"""`lily_mlx.generate`: mlx_lm's own generate command and functions, on an accelerated model."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import io
import json
import sys
from types import SimpleNamespace

import mlx_lm
from mlx_lm.generate import batch_generate, generate, stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from . import cli
from .checkpoint import embedded_checkpoint
from .hook import Report, accelerate

__all__ = ["batch_generate", "generate", "load", "main", "setup_arg_parser", "stream_generate"]

NAME = "lily_mlx.generate"
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)

# `import mlx_lm.generate` gives the function of that name.
stock = importlib.import_module("mlx_lm.generate")
_stock_setup_arg_parser = stock.setup_arg_parser


@functools.wraps(mlx_lm.load)
def load(*args, **kwargs):
    """mlx_lm.load, then `accelerate`, adapters included. A lazy load is left for the caller."""
    loaded = mlx_lm.load(*args, **kwargs)
    if not inspect.signature(mlx_lm.load).bind(*args, **kwargs).arguments.get("lazy"):
        accelerate(loaded[0])
    return loaded


def setup_arg_parser() -> argparse.ArgumentParser:
    """mlx_lm.generate's parser with lily_mlx's flags in a group of their own."""
    parser = _stock_setup_arg_parser()
    parser.prog = NAME
    for action in parser._actions:
        if action.dest == "model":
            action.help = (
                "The path to the local model directory or Hugging Face repo. "
                "If no model is specified, the small one inside lily_mlx is used."
            )
    group = parser.add_argument_group("lily_mlx")
    group.add_argument("--from-file", metavar="FILE", help="Read the prompt from a UTF-8 file")
    group.add_argument(
        "--stock", action="store_true", help="Run mlx_lm's own layers, to compare with"
    )
    group.add_argument(
        "--report", action="store_true", help="Say on stderr which parts of the model were fused"
    )

    def error(message: str):
        print(f"{parser.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error
    return parser


def main() -> None:
    """The command. Flags, output and exit codes are mlx_lm's; bad input is one line and exit 2."""
    so_far: list[str] = []
    args = setup_arg_parser().parse_args()

    def on_interrupt():
        print("" if args.verbose else "".join(so_far))

    def recorded(*a, **kw):
        for response in stream_generate(*a, **kw):
            so_far.append(response.text)
            yield response

    with cli.command(NAME, on_interrupt):
        _check(args)
        # mlx_lm's main looks these up by name, so its own code runs with ours in their place.
        stock.setup_arg_parser = lambda: SimpleNamespace(parse_args=lambda: args)
        stock.DEFAULT_MODEL = str(embedded_checkpoint())
        stock.load = functools.partial(_load, args)
        stock.stream_generate = recorded
        try:
            stock.main()
        except (ValueError, NotImplementedError, ImportError, FileNotFoundError) as e:
            raise cli.BadInput(e) from e


def _load(args: argparse.Namespace, model: str, **kwargs):
    cli.check_model(model)
    try:
        loaded = (mlx_lm.load if args.stock else load)(model, **kwargs)
    except Exception as e:  # the Hub, the network, json, safetensors, mlx: each raises its own
        raise cli.BadInput(f"cannot load {model}: {e or type(e).__name__}") from e
    if not loaded[1].encode("a"):  # transformers makes an empty tokenizer of a missing one
        raise cli.BadInput(f"cannot load {model}: its tokenizer files are missing")
    if args.draft_model is not None and not can_trim_prompt_cache(make_prompt_cache(loaded[0])):
        raise cli.BadInput(
            f"{model} cannot use --draft-model: its recurrent state cannot be trimmed; leave it out"
        )
    if args.report:
        report = Report(type(loaded[0]).__module__, left={"": "--stock"})
        print(f"lily_mlx: {report if args.stock else accelerate(loaded[0])}", file=sys.stderr)
    return loaded


def _check(args: argparse.Namespace) -> None:
    """Refuse, before the model loads, what mlx_lm would fail on later or loop over for ever."""

    def require(ok: bool, flag: str, value: object, want: str) -> None:
        if not ok:
            raise cli.BadInput(f"argument {flag}: {value} is not {want}")

    require(args.model != "", "--model", "''", "a folder or a Hub name")
    require(args.max_tokens != 0, "--max-tokens", args.max_tokens, "a count, or -1 for no limit")
    require(args.prefill_step_size > 0, "--prefill-step-size", args.prefill_step_size, "above 0")
    if args.max_kv_size is not None:
        require(args.max_kv_size > 0, "--max-kv-size", args.max_kv_size, "above 0")
    if args.kv_bits is not None:
        require(args.kv_bits in KV_BITS, "--kv-bits", args.kv_bits, f"one of {KV_BITS}")
        require(
            args.kv_group_size in KV_GROUP_SIZES,
            "--kv-group-size",
            args.kv_group_size,
            f"one of {KV_GROUP_SIZES}",
        )
    if args.chat_template_config is not None:
        try:
            ok = isinstance(json.loads(args.chat_template_config), dict)
        except json.JSONDecodeError:
            ok = False
        require(ok, "--chat-template-config", args.chat_template_config, "a JSON object")
    if args.draft_model is not None:
        cli.check_model(args.draft_model)
    if args.prompt_cache_file is not None:
        cli.check_safetensors(args.prompt_cache_file)

    prompt = args.prompt
    if args.from_file is not None:
        if prompt != stock.DEFAULT_PROMPT:
            raise cli.BadInput("give --prompt or --from-file, not both")
        prompt = cli.read_text(args.from_file, args.from_file)
    elif prompt == "-":
        prompt = cli.read_text(sys.stdin.buffer, "the prompt on stdin")
    if not prompt:
        raise cli.BadInput("the prompt is empty; give text with --prompt, --from-file or on stdin")
    if prompt is not args.prompt:
        # Through stdin mlx_lm takes the text as it is, with no escapes undone.
        args.prompt, sys.stdin = "-", io.StringIO(prompt)


if __name__ == "__main__":
    main()
