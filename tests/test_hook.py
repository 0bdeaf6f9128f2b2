"""accelerate, restore and install: nothing a program can see changes, except the speed."""

from __future__ import annotations

import copy
import importlib
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from models import qwen3_5_moe_model, qwen3_model

import lily_mlx
from lily_mlx.layers import mlp
from lily_mlx.layers.base import Fused

Q4 = {"group_size": 64, "bits": 4}
LORA = {"rank": 4, "scale": 20.0, "dropout": 0.0}


def snapshot(model: nn.Module) -> dict[str, bytes]:
    """Every parameter's name, dtype, shape and bytes."""
    return {
        name: (value.dtype, value.shape, bytes(memoryview(value.view(mx.uint8))))
        for name, value in tree_flatten(model.parameters())
    }


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def tokens(model: nn.Module, n: int = 12) -> list[int]:
    prompt = mx.arange(3, 14) % 300
    return [token for token, _ in generate_step(prompt, model, max_tokens=n)]


def logits(model: nn.Module) -> mx.array:
    cache = model.make_cache()
    model(mx.arange(9)[None], cache=cache)
    return mx.concatenate([model(mx.array([[t]]), cache=cache) for t in (5, 7)], axis=1)


def test_tree_and_values_stay_and_restore_is_exact():
    model = qwen3_5_moe_model(dtype=mx.bfloat16, quantization=Q4)
    weights, types, expected = snapshot(model), classes(model), logits(model)

    report = lily_mlx.accelerate(model)
    assert report.architecture == "qwen3_5_moe"
    assert len(report.fused) == 4 * 4 and not report.left
    assert set(report.fused) == {p for p, t in classes(model).items() if issubclass(t, Fused)}
    assert snapshot(model) == weights
    for path, fused in classes(model).items():
        assert issubclass(fused, types[path])
    assert mx.array_equal(logits(model), expected)

    lily_mlx.restore(model)
    assert classes(model) == types and snapshot(model) == weights
    assert mx.array_equal(logits(model), expected)


def test_accelerate_again_changes_nothing():
    model = qwen3_5_moe_model(quantization=Q4)
    first = lily_mlx.accelerate(model)
    packs = {path: m._packs for path, m in model.named_modules() if isinstance(m, Fused)}
    assert lily_mlx.accelerate(model) == first
    assert all(m._packs is packs[path] for path, m in model.named_modules() if path in packs)


def test_weights_are_held_once():
    model = qwen3_5_moe_model(quantization=Q4, num_experts=32)
    mx.clear_cache()
    before = mx.get_active_memory()
    lily_mlx.accelerate(model)
    mx.clear_cache()
    # Buffers are rounded up to whole pages, and a packed buffer is one in place of several.
    assert mx.get_active_memory() <= before * 1.02
    lily_mlx.restore(model)
    mx.clear_cache()
    assert mx.get_active_memory() <= before * 1.02


def test_threads_accelerate_and_generate_together():
    model = qwen3_5_moe_model(quantization=Q4)
    expected = tokens(model)
    results: list[list[int]] = []
    errors: list[BaseException] = []

    def work(index: int):
        try:
            for _ in range(3):
                lily_mlx.accelerate(model)
                results.append(tokens(model))
                if index == 0:
                    lily_mlx.restore(model)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == 12 and all(result == expected for result in results)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_is_never_ignored(when):
    """On every packed projection, dense and expert: a packed weight must not bypass an adapter."""
    model, reference = (qwen3_5_moe_model(quantization=Q4) for _ in range(2))

    def adapt(m):
        mx.random.seed(7)
        linear_to_lora_layers(m, num_layers=4, config=LORA)
        noise = {
            n: 0.1 * mx.random.normal(v.shape)
            for n, v in tree_flatten(m.parameters())
            if n.endswith("lora_b")
        }
        assert any("switch_mlp.gate_proj" in n for n in noise)
        m.load_weights(list(noise.items()), strict=False)
        m.eval()

    plain = logits(reference)
    adapt(reference)
    if when == "after":
        lily_mlx.accelerate(model)
        adapt(model)
    else:
        adapt(model)
        report = lily_mlx.accelerate(model)
        assert report.left and "LoRA" in str(report)
    assert mx.array_equal(logits(model), logits(reference))
    assert not mx.allclose(logits(model), plain, atol=1e-2)

    remove_lora_layers(model)
    remove_lora_layers(reference)
    lily_mlx.accelerate(model)
    assert mx.array_equal(logits(model), logits(reference))


def test_new_weights_are_used():
    model = qwen3_5_moe_model()
    lily_mlx.accelerate(model)
    changed = tree_map(lambda p: p * 1.5, model.parameters())
    model.update(changed)
    reference = qwen3_5_moe_model()
    reference.update(tree_map(lambda p: p * 1.5, reference.parameters()))
    assert mx.array_equal(logits(model), logits(reference))
    report = lily_mlx.accelerate(model)
    assert len(report.fused) == 16
    assert mx.array_equal(logits(model), logits(reference))


def test_cast_after_accelerate():
    model, reference = (qwen3_5_moe_model(quantization=Q4) for _ in range(2))
    lily_mlx.accelerate(model)
    for m in (model, reference):
        m.set_dtype(mx.bfloat16)
    assert mx.array_equal(logits(model), logits(reference))


def test_mixed_quantization_is_left_with_a_reason():
    model = qwen3_5_moe_model(
        quantization=Q4,
        mixed={"self_attn.v_proj": {"group_size": 64, "bits": 8}},
    )
    expected = logits(model)
    report = lily_mlx.accelerate(model)
    assert report.left == {
        "language_model.model.layers.3.self_attn": "weight differs in dtype or shape"
    }
    assert mx.array_equal(logits(model), expected)


@pytest.mark.parametrize(
    "quantization",
    [None]
    + [{"group_size": g, "bits": b} for g in (32, 64, 128) for b in (2, 3, 4, 5, 6, 8)]
    + [
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    ],
    ids=str,
)
def test_every_quantization(quantization):
    model = qwen3_5_moe_model(quantization=quantization)
    expected = logits(model)
    report = lily_mlx.accelerate(model)
    assert len(report.fused) == 16 and not report.left
    assert mx.array_equal(logits(model), expected)


def test_no_plan_and_no_model():
    model = qwen3_model()
    report = lily_mlx.accelerate(model)
    assert not report.fused and report.left == {"": "no plan for this architecture"}
    assert str(report) == ("qwen3: 0 parts fused, 1 left to mlx_lm (no plan for this architecture)")
    with pytest.raises(TypeError, match=r"mlx\.nn\.Module, not dict"):
        lily_mlx.accelerate({})


def test_biases_are_packed_too():
    """attention_bias models: a bias is as much a part of the projection as its weight."""
    model = qwen3_5_moe_model(quantization=Q4, attention_bias=True)
    for _, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear) and "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)
    expected = logits(model)
    assert len(lily_mlx.accelerate(model).fused) == 16
    assert mx.array_equal(logits(model), expected)


def test_gradients_are_mlx_lms():
    def loss(model, ids):
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    ids = mx.arange(6)[None]
    model, reference = qwen3_5_moe_model(), qwen3_5_moe_model()
    lily_mlx.accelerate(model)
    for training in (False, True):
        grads = []
        for m in (model, reference):
            m.train(training)
            grads.append(dict(tree_flatten(nn.value_and_grad(m, loss)(m, ids)[1])))
        assert grads[0].keys() == grads[1].keys()
        for name, grad in grads[0].items():
            assert mx.array_equal(grad, grads[1][name]), name
    model.eval()
    assert mx.array_equal(logits(model), logits(reference))


def test_a_copy_stands_alone():
    model = qwen3_5_moe_model(quantization=Q4)
    lily_mlx.accelerate(model)
    twin = copy.deepcopy(model)
    twin.update(tree_map(lambda p: p * 0, twin.parameters()))
    assert not mx.array_equal(logits(twin), logits(model))
    assert len(lily_mlx.accelerate(copy.deepcopy(model)).fused) == 16


def test_saved_weights_are_the_originals(tmp_path):
    model = qwen3_5_moe_model(quantization=Q4)
    before = snapshot(model)
    lily_mlx.accelerate(model)
    model.save_weights(str(tmp_path / "w.safetensors"))
    fresh = qwen3_5_moe_model(quantization=Q4, seed=1)
    fresh.load_weights(str(tmp_path / "w.safetensors"))
    assert snapshot(fresh) == before


@pytest.mark.parametrize("how", ["wrong", "raises", "nan"])
def test_a_class_that_disagrees_is_not_used(monkeypatch, capsys, how):
    """What a later mlx_lm changes must show at load, on one line, and cost only the speed."""
    model = qwen3_5_moe_model(quantization=Q4)
    expected = logits(model)

    def broken(self, x):
        if how == "raises":
            raise RuntimeError("no such\nattribute")
        return Qwen3NextMLP.__call__(self, x) * (1.1 if how == "wrong" else float("nan"))

    monkeypatch.setattr(mlp.FusedMLP, "__call__", broken)
    report = lily_mlx.accelerate(model)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lily_mlx: FusedMLP is not used: ")
    assert len(report.left) == 4 and len(report.fused) == 12
    assert all(path.endswith("shared_expert") for path in report.left)
    assert mx.array_equal(logits(model), expected)


def test_install_reaches_names_imported_before(monkeypatch, capsys):
    utils = importlib.import_module("mlx_lm.utils")
    models = {"a": qwen3_5_moe_model(quantization=Q4), "b": qwen3_model()}
    monkeypatch.setattr(utils, "load_model", lambda path, lazy=False, **kw: (models[path], kw))
    calls = utils.load_model
    lily_mlx.install()
    try:
        once = utils.load_model
        lily_mlx.install()
        assert utils.load_model is once
        assert utils.load_model("a", True, strict=False) == (models["a"], {"strict": False})
        assert not any(isinstance(m, Fused) for m in models["a"].modules())
        utils.load_model("a", lazy=False)
        assert any(isinstance(m, Fused) for m in models["a"].modules())
        utils.load_model("b")
        assert capsys.readouterr().err == (
            "lily_mlx: qwen3: 0 parts fused, 1 left to mlx_lm (no plan for this architecture)\n"
        )
    finally:
        lily_mlx.uninstall()
    assert utils.load_model is calls


def test_stock_classes_are_untouched():
    before = SwitchGLU.__call__
    lily_mlx.accelerate(qwen3_5_moe_model(quantization=Q4))
    assert SwitchGLU.__call__ is before
    assert not any(isinstance(m, Fused) for m in qwen3_5_moe_model().modules())
