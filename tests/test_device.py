"""Chips by their names, and the tuning table's layers."""

from __future__ import annotations

import pytest

from lily_mlx import device
from lily_mlx.runtime import source


@pytest.mark.parametrize(
    ("name", "platform", "keys"),
    [
        ("Apple M5 Max", "metal", ("m5 max", "m5", "apple", "default")),
        ("Apple M1", "metal", ("m1", "apple", "default")),
        ("Apple M10 Ultra", "metal", ("m10 ultra", "m10", "apple", "default")),
        ("Apple Paravirtual device", "metal", ("apple", "default")),
        ("NVIDIA H200", "cuda", ("h200", "nvidia", "default")),
        ("NVIDIA A100-SXM4-80GB", "cuda", ("a100", "nvidia", "default")),
        ("NVIDIA GeForce RTX 4090", "cuda", ("rtx 4090", "nvidia", "default")),
        ("NVIDIA Something", "cuda", ("nvidia", "default")),
        ("AMD EPYC", "cpu", ("cpu", "default")),
    ],
)
def test_identify(name, platform, keys):
    chip = device.identify({"device_name": name, "memory_size": 7}, platform)
    assert (chip.name, chip.keys, chip.memory) == (name, keys, 7)


def test_a_chips_values_are_laid_over_the_default(monkeypatch):
    table = {"k": {"default": {"a": 1, "b": 1}, "m5": {"b": 2, "c": 2}, "m5 max": {"c": 3}}}
    monkeypatch.setattr(device, "TUNING", table)
    chip = device.identify({"device_name": "Apple M5 Max"}, "metal")
    monkeypatch.setattr(device, "chip", lambda: chip)
    assert device.tuned.__wrapped__("k") == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(KeyError):
        device.tuned.__wrapped__("none")


def test_this_machine():
    assert device.chip().name and device.chip().keys[-1] == "default"


def test_only_kernels_are_tuned():
    assert set(device.TUNING) <= set(source.names())
    assert all("default" in chips for chips in device.TUNING.values())
