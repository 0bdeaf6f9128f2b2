"""`python -m lily_mlx <command>`, as `python -m mlx_lm <command>`."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points, version

from . import cli, run

COMMANDS = ("generate", "run")


def main() -> None:
    """Run a command of lily_mlx's own, or mlx_lm's of that name with the load hook installed."""
    with cli.command("lily_mlx"):
        theirs = {
            script.name.removeprefix("mlx_lm.")
            for script in entry_points(group="console_scripts")
            if script.name.startswith("mlx_lm.")
        }
        names = ", ".join(sorted({*COMMANDS, *theirs}))
        name = sys.argv[1] if len(sys.argv) > 1 else None
        if name in ("-h", "--help"):
            print(f"usage: lily_mlx COMMAND [ARGUMENTS ...]\n\ncommands: {names}")
        elif name == "--version":
            print(f"lily_mlx {version('lily_mlx')}, mlx_lm {version('mlx_lm')}")
        elif name in COMMANDS:
            sys.argv = [f"lily_mlx.{name}", *sys.argv[2:]]
            importlib.import_module(f"lily_mlx.{name}").main()
        elif name in theirs:
            run.run(f"mlx_lm.{name}", sys.argv[2:])
        else:
            raise cli.BadInput(f"{f'no command {name}' if name else 'no command'}; one of {names}")


if __name__ == "__main__":
    main()
