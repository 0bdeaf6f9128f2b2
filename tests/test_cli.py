"""lily_mlx.generate at the command line: mlx_lm.generate's behaviour, and what it adds."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import lily_mlx
from lily_mlx.layers.base import Fused

generate = importlib.import_module("lily_mlx.generate")
stock = importlib.import_module("mlx_lm.generate")
FOLDER = str(lily_mlx.embedded_checkpoint())
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def run(monkeypatch, capfd):
    """Call the command in this process: run(*flags, stdin=b"") -> (exit code, stdout, stderr)."""
    for name in ("setup_arg_parser", "DEFAULT_MODEL", "load", "stream_generate"):
        monkeypatch.setattr(stock, name, getattr(stock, name))

    def call(*flags: str, stdin: bytes = b"", main=generate.main, name="lily_mlx.generate"):
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def text_of(out: str) -> list[str]:
    """The lines of the output that do not tell time or memory."""
    return [re.sub(r"[\d.]+ tokens-per-sec|[\d.]+ GB", "#", line) for line in out.splitlines()]


FLAGS = [
    (),
    ("-p", "Once upon a time", "--ignore-chat-template", "--temp", "0.7", "--seed", "3"),
    ("--verbose", "False", "--system-prompt", "Be brief.", "--prefill-response", "The"),
    ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0", "--top-k", "4"),
    ("--max-kv-size", "16", "--prefill-step-size", "3", "--extra-eos-token", "the", "a"),
    ("--use-default-chat-template", "--chat-template-config", '{"enable_thinking": false}'),
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_output_is_mlx_lms(run, flags):
    flags = ("--max-tokens", "8", *flags)
    theirs = run("--model", FOLDER, *flags, main=stock.main, name="mlx_lm.generate")
    ours = run(*flags)
    assert theirs[0] == ours[0] == 0
    assert len(theirs[1]) > 5 and text_of(ours[1]) == text_of(theirs[1])
    assert ours[2] == theirs[2]


def test_every_flag_and_default_is_mlx_lms():
    ours = {a.dest: a for a in generate.setup_arg_parser()._actions}
    theirs = {a.dest: a for a in stock.setup_arg_parser()._actions}
    for name, action in theirs.items():
        for field in ("option_strings", "default", "type", "nargs", "choices", "required"):
            assert getattr(ours[name], field) == getattr(action, field), name
    assert set(ours) - set(theirs) == {"from_file", "stock", "report"}


def test_prompt_files_and_stdin(run, tmp_path):
    text = "Once upon a time, in winter,\n"
    (tmp_path / "p.txt").write_text(text)
    flags = ("--max-tokens", "5", "--ignore-chat-template")
    theirs = run("--model", FOLDER, *flags, "-p", "-", stdin=text.encode(), main=stock.main)
    assert theirs[0] == 0
    for ours in (
        run(*flags, "-p", "-", stdin=text.encode()),
        run(*flags, "--from-file", tmp_path / "p.txt"),
    ):
        assert text_of(ours[1]) == text_of(theirs[1])


def test_prompt_cache_file(run, tmp_path):
    """A cache file written by mlx_lm is read here, and names the model."""
    model, tokenizer = mlx_lm.load(FOLDER)
    cache = make_prompt_cache(model)
    model(mx.array(tokenizer.encode("Once upon a time there was a fox"))[None], cache=cache)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": FOLDER, "tokenizer_config": json.dumps({})})
    flags = ("--prompt-cache-file", file, "-p", "and a crow", "-m", "6", "--ignore-chat-template")
    theirs = run(*flags, main=stock.main)
    assert theirs[0] == 0 and text_of(run(*flags)[1]) == text_of(theirs[1])


def test_own_flags(run):
    code, _, err = run("-m", "1", "--report")
    assert code == 0 and re.fullmatch(
        r"lily_mlx: qwen3_5_moe: \d+ parts fused, 0 left to mlx_lm\n", err
    )
    code, _, err = run("-m", "1", "--report", "--stock")
    assert code == 0 and "0 parts fused" in err


@pytest.fixture
def broken(tmp_path):
    """broken(what) -> a copy of the embedded checkpoint with one thing wrong."""

    def make(what: str):
        folder = tmp_path / what
        shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        config = folder / "config.json"
        weights = folder / "model.safetensors"
        if what == "no config":
            config.unlink()
        elif what == "config not json":
            config.write_text("{")
        elif what == "config a list":
            config.write_text("[]")
        elif what == "unknown model type":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nope"}))
        elif what == "truncated":
            os.truncate(weights, weights.stat().st_size // 2)
        elif what == "empty weights":
            os.truncate(weights, 0)
        elif what == "no weights":
            weights.unlink()
        elif what in ("fewer layers", "wider"):
            data = json.loads(config.read_text())
            change = {"num_hidden_layers": 4} if what == "fewer layers" else {"hidden_size": 512}
            data["text_config"] |= change
            config.write_text(json.dumps(data))
        elif what == "no tokenizer":
            for path in folder.glob("tokenizer*"):
                path.unlink()
        else:
            raise ValueError(what)
        return folder

    return make


def assert_one_line(result, *words: str) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lily_mlx.generate: error: ")
    assert len(lines[0]) < 500
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("no config", "config.json"),
        ("config not json", "JSON"),
        ("config a list", "JSON object"),
        ("unknown model type", "nope"),
        ("truncated", "model.safetensors"),
        ("empty weights", "model.safetensors"),
        ("no weights", "no weights"),
        ("fewer layers", "parameters"),
        ("wider", "shape"),
        ("no tokenizer", "cannot load"),
    ],
)
def test_bad_models(run, broken, what, word):
    assert_one_line(run("--model", broken(what)), word)


def test_bad_input(run, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    for flags, word in [
        (("--model", tmp_path / "no" / "such"), "does not exist"),
        (("--model", "./nothing"), "does not exist"),
        (("--model", latin), "not a folder"),
        (("--model", ""), "--model"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--temp", "hot"), "--temp"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--kv-bits", "7"), "--kv-bits"),
        (("--kv-bits", "8", "--kv-group-size", "48"), "--kv-group-size"),
        (("--prefill-step-size", "0"), "--prefill-step-size"),
        (("--max-kv-size", "-1"), "--max-kv-size"),
        (("--chat-template-config", "{"), "--chat-template-config"),
        (("--prompt", ""), "empty"),
        (("--from-file", tmp_path / "empty.txt"), "empty"),
        (("--from-file", tmp_path / "none.txt"), "No such file"),
        (("--from-file", latin), "UTF-8"),
        (("--from-file", latin, "-p", "hi"), "not both"),
        (("--prompt-cache-file", tmp_path / "none.safetensors"), "does not exist"),
        (("--prompt-cache-file", latin), "latin.txt"),
        (("--adapter-path", tmp_path / "none"), "adapter"),
        (("--draft-model", tmp_path / "none"), "does not exist"),
        (("--draft-model", FOLDER), "trimmed"),
    ]:
        result = run(*flags)
        assert_one_line(result, word)
    assert_one_line(run("-p", "-"), "empty")
    assert_one_line(run("-p", "-", stdin=b"\xff\xfe"), "UTF-8")


def interrupt(*flags: str, wait_for: bytes, after: float = 0.0):
    """Start the command, Ctrl-C it once it has written `wait_for`; (code, stdout, stderr, s)."""
    command = [sys.executable, "-m", "lily_mlx", "generate", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
        bufsize=0,
        # As a terminal starts it. Tests may run in a background job, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    seen = b""
    while wait_for not in seen:
        byte = process.stdout.read(1)
        assert byte, process.stderr.read()
        seen += byte
    time.sleep(after)
    start = time.perf_counter()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, seen + out, err, time.perf_counter() - start


def test_interrupt_while_generating():
    head = b"=" * 10 + b"\n"
    code, out, err, seconds = interrupt("-m", "4000", "--temp", "1", wait_for=head, after=3)
    assert (code, err) == (130, b"") and seconds < 1
    text = out.removeprefix(head)
    assert len(text) > 5 and text.endswith(b"\n") and b"Traceback" not in out


def test_interrupt_in_a_long_prefill(tmp_path):
    """MLX evaluates a chunk outside Python, where Ctrl-C is not heard until it is done."""
    (tmp_path / "long.txt").write_text("word " * 20_000)
    flags = ("--from-file", str(tmp_path / "long.txt"), "--prefill-step-size", "20000")
    code, _, err, seconds = interrupt(*flags, wait_for=b"=\n", after=1)
    # transformers warns, as it does under mlx_lm, that the prompt is longer than model_max_length.
    assert code == 130 and b"Traceback" not in err and seconds < 1


def test_interrupt_keeps_text_that_was_not_shown_yet(run, monkeypatch):
    """--verbose False writes at the end: on Ctrl-C, what there is."""
    real = generate.stream_generate

    def three(*args, **kwargs):
        for n, response in enumerate(real(*args, **kwargs)):
            if n == 3:
                raise KeyboardInterrupt
            yield response

    full = run("--verbose", "False", "-m", "8")[1]
    monkeypatch.setattr(generate, "stream_generate", three)
    code, out, err = run("--verbose", "False", "-m", "8")
    assert (code, err) == (130, "") and len(out) > 1 and full.startswith(out.rstrip("\n"))


def test_reader_that_leaves():
    command = f"{sys.executable} -m lily_mlx generate -m 400 | head -c 11"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=ENV, timeout=120)
    assert done.stdout.startswith(b"=" * 10) and done.stderr == b""


def test_commands(tmp_path):
    """Console scripts exist, `python -m` works in each form, and mlx_lm's programs get the hook."""
    names = {s.name for s in entry_points(group="console_scripts") if "lily_mlx" in s.value}
    assert {"lily_mlx", "lily_mlx.generate", "lily_mlx.run"} <= names

    def python(*flags: str):
        return subprocess.run(
            [sys.executable, *flags], capture_output=True, text=True, env=ENV, timeout=120
        )

    script = tmp_path / "program.py"
    script.write_text(
        "import sys, mlx_lm\n"
        "model, _ = mlx_lm.load(sys.argv[1])\n"
        "print([c.__name__ for c in sorted({type(m) for m in model.modules()}, key=str)])\n"
    )
    done = python("-m", "lily_mlx.run", str(script), FOLDER)
    for fused in Fused.__subclasses__():
        assert fused.__name__ in done.stdout, done.stderr
    done = python("-m", "lily_mlx.run", "mlx_lm.generate", "--model", FOLDER, "-m", "2")
    assert done.returncode == 0 and "Generation: 2 tokens" in done.stdout
    done = python("-m", "lily_mlx", "nonsense")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "generate" in done.stderr
    done = python("-m", "lily_mlx.run", "nonsense.py")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "mlx_lm" in python("-m", "lily_mlx", "--version").stdout
