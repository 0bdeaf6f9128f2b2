"""Random input is fresh in each run; its seed is in the header, LILY_SEED repeats it."""

from __future__ import annotations

import os
import random

import mlx.core as mx
import pytest

SEED = int(os.environ.get("LILY_SEED", random.SystemRandom().randrange(2**31)))


def pytest_report_header() -> str:
    return f"LILY_SEED={SEED}"


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(SEED)
