"""`python -m lily_mlx.run mlx_lm.server ...`: an mlx_lm program, unmodified, accelerated."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

from . import cli
from .hook import install

NAME = "lily_mlx.run"


def main() -> None:
    """Run a console script (mlx_lm.server), a module or a .py file; the rest is its arguments."""
    with cli.command(NAME):
        if len(sys.argv) < 2:
            raise cli.BadInput("give a program, e.g. python -m lily_mlx.run mlx_lm.server --help")
        if sys.argv[1] in ("-h", "--help"):
            print(f"usage: {NAME} PROGRAM [ARGUMENTS ...]\n\n{main.__doc__}")
            return
        run(sys.argv[1], sys.argv[2:])


def run(program: str, arguments: list[str]) -> None:
    """Install the hook, then run `program` as if it had been started with `arguments`.

    Raises: cli.BadInput if there is no such program.
    """
    install()
    sys.argv = [program, *arguments]
    scripts = entry_points(group="console_scripts", name=program)
    if scripts:
        next(iter(scripts)).load()()
    elif Path(program).is_file():
        runpy.run_path(program, run_name="__main__")
    elif _is_module(program):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        raise cli.BadInput(f"no command, file or module named {program}")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


if __name__ == "__main__":
    main()
