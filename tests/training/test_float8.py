"""Products of float8: torchao's, rounded as on a GPU and computed here in float32, and where they are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from easytorch.training import float8, train
from easytorch.training.metrics import read_metrics, series
from easytorch.training.prepare import check_inputs

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = {"model_type": "llama", **SIZES, "num_key_value_heads": 4}


def test_a_device_without_them_is_refused_before_anything_is_written(settings, monkeypatch):
    config = settings(dtype="float8")
    with pytest.raises(ValueError, match=r"dtype \(--dtype\) float8: the device cpu has no products of float8"):
        check_inputs(config, 1)
    for name, capability, words in (("A100", (8, 0), "compute capability 8.0"), ("H100", (9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        why = float8.refusal(torch.device("cuda"))
        assert (why is None) if words is None else words in why, name
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, taken in (("gfx90a", False), ("gfx942", True), ("gfx950", True)):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert (float8.refusal(torch.device("cuda")) is None) is taken, name
    monkeypatch.setattr(float8, "refusal", lambda device: None)
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs torchao: pip install torchao"):
        check_inputs(config, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": "tp=2"}, r"layers over tp do not compute in dtype \(--dtype\) float8"),
        ({"lora": {"rank": 2}, "model": "folder"}, r"float8 is for training all weights"),
        ({"device": "xla"}, "of 16 bits at least"),
    ],
)
def test_what_it_does_not_go_with_is_named(settings, changes, said):
    with pytest.raises(ValueError, match=said):
        settings(dtype="float8", **changes).axes(2)


def test_the_layers_compute_in_float8_and_learn_what_bfloat16_does(settings, monkeypatch):
    torchao = pytest.importorskip("torchao.float8.float8_linear")
    monkeypatch.setattr(float8, "refusal", lambda device: None)
    calls, forward = [], torchao.Float8Linear.forward

    def counted(self, x):
        calls.append(tuple(x.shape))
        return forward(self, x)

    monkeypatch.setattr(torchao.Float8Linear, "forward", counted)
    runs = {kind: settings(kind, dtype=kind, model=MODEL) for kind in ("bfloat16", "float8")}
    losses = {kind: [one for _, one in series(_metrics(config), "loss")] for kind, config in runs.items()}
    assert len(calls) >= 10 * 2 * 7, "each projection of each layer in each step"
    assert losses["float8"] != losses["bfloat16"]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=2e-2)
    assert losses["float8"][-1] < losses["float8"][0] - 0.3


def _metrics(config):
    train(config)
    return read_metrics(f"{config.output}/metrics.jsonl")


def test_heads_and_odd_sizes_stay(settings, monkeypatch):
    pytest.importorskip("torchao")
    model = nn.ModuleDict({"a": nn.Linear(32, 16), "odd": nn.Linear(32, 24), "head": nn.Linear(32, 64)})
    model.get_output_embeddings = lambda: model["head"]
    model.device = torch.device("cpu")
    assert float8.use_float8(model) == 1
    assert [type(one).__name__ for one in model.values()] == ["Float8Linear", "Linear", "Linear"]
    del model["a"]
    with pytest.raises(ValueError, match="no linear layers whose sizes are multiples of 16"):
        float8.use_float8(model)
