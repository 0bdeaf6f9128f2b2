"""What pip installs is whole: a wheel in an empty environment generates, kernels inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (built,) = folder.glob("lily_mlx-*.whl")
    return built


def test_wheel_holds_every_file(wheel):
    """Every tracked file of the package and every kernel, and nothing else from the repository."""
    tracked = subprocess.run(
        ["git", "ls-files", "lily_mlx", "metal_kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    expected = {
        f"lily_mlx/{name}" if name.startswith("metal_kernels/") else name
        for name in filter(None, tracked)
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names} == {"lily_mlx"}


def test_wheel_generates_in_an_empty_environment(wheel, tmp_path):
    """No tests, no repository, no network for the model: only what pip put there."""
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    extra = "[cpu]" if sys.platform == "linux" else ""
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}{extra}"], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python.with_name("lily_mlx.generate"), "-m", "4", "--report"],
        cwd=tmp_path,
        env=env | {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Generation: 4 tokens" in done.stdout
    assert " 0 left to mlx_lm" in done.stderr
