"""What every command shares: one-line errors with exit code 2, and a Ctrl-C that is quick."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# How long the main thread may take to stop after Ctrl-C. MLX evaluates outside Python, where a
# KeyboardInterrupt has to wait for a whole prefill chunk.
GRACE_S = 0.6
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
BROKEN_PIPE = 141  # 128 + SIGPIPE


class BadInput(Exception):
    """The user's input cannot be used. The message says what is wrong and what to do."""


@contextmanager
def command(name: str, on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run a command's body: bad input is one line and exit 2, Ctrl-C is exit 130 within a second.

    Args:
        name: the command, to begin the line with.
        on_interrupt: called once on Ctrl-C, to write what there is so far. It may be called from
            another thread.
    Raises: SystemExit with the exit code. `LILY_DEBUG=1` lets the traceback of bad input through.
    """
    stop = _Interrupt(on_interrupt)
    try:
        with stop.watch():
            yield
            sys.stdout.flush()
    except KeyboardInterrupt:
        stop.report()
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None
    except BadInput as e:
        if os.environ.get("LILY_DEBUG"):
            raise
        sys.stdout.flush()
        print(f"{name}: error: {one_line(e)}", file=sys.stderr)
        raise SystemExit(2) from None


class _Interrupt:
    """Reports an interruption once, from the main thread or, if that is busy, from a watcher."""

    def __init__(self, on_interrupt: Callable[[], None]):
        self._on_interrupt = on_interrupt
        self._once = threading.Lock()

    def report(self) -> None:
        if self._once.acquire(blocking=False):
            self._on_interrupt()
            sys.stdout.flush()
            sys.stderr.flush()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A signal also writes a byte to a socket, where a thread sees it if Python is busy."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        done = threading.Event()

        def wait() -> None:
            while byte := reader.recv(1):
                if byte[0] == signal.SIGINT and not done.wait(GRACE_S):
                    self.report()
                    os._exit(INTERRUPTED)

        threading.Thread(target=wait, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            signal.set_wakeup_fd(before)
            writer.close()


def one_line(message: object, limit: int = 300) -> str:
    """The message on one line, its middle cut if it is longer than `limit` characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= limit else f"{text[: limit - 60]} ... {text[-50:]}"


def read_text(stream_or_path: object, name: str) -> str:
    """All of a binary stream or of the file at a path, as UTF-8.

    Raises: BadInput if it cannot be read or is not UTF-8.
    """
    try:
        if isinstance(stream_or_path, str | Path):
            data = Path(stream_or_path).read_bytes()
        else:
            data = stream_or_path.read()
        return data.decode("utf-8")
    except OSError as e:
        raise BadInput(f"cannot read {name}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadInput(
            f"{name} is not UTF-8 text (byte {e.start}); convert it, e.g. with iconv"
        ) from e


def check_model(model: str | Path) -> None:
    """Refuse a local model folder that cannot load, before anything is read in full.

    A name that is no path on this machine is left to the Hugging Face Hub.
    Raises: BadInput.
    """
    folder = Path(model)
    if not folder.exists():
        if str(model).count("/") > 1 or str(model).startswith(("/", ".", "~")):
            raise BadInput(f"model folder {model} does not exist; give a folder or a Hub name")
        return
    if not folder.is_dir():
        raise BadInput(f"{model} is not a folder; give the folder that holds config.json")
    config = folder / "config.json"
    if not config.is_file():
        raise BadInput(f"{model} has no config.json; is it a model folder?")
    try:
        if not isinstance(json.loads(read_text(config, str(config))), dict):
            raise BadInput(f"{config} is not a JSON object")
    except json.JSONDecodeError as e:
        raise BadInput(f"{config} is not JSON: {e}") from e
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise BadInput(f"{model} has no weights (model*.safetensors)")
    for path in weights:
        check_safetensors(path)


def check_safetensors(path: str | Path) -> None:
    """Refuse a missing, truncated or foreign safetensors file by its header.

    Raises: BadInput.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as e:
        reason = "it does not exist" if not Path(path).exists() else e
        raise BadInput(f"{path} cannot be used: {reason}") from e
