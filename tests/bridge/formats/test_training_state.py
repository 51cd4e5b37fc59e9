"""Pickles of whole training states: the model is read, the rest reported, and nothing is run."""

import json
from collections import OrderedDict

import pytest
import torch

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.torch_files.training_state import training_path

WEIGHTS = {"encoder.weight": torch.ones(2, 3), "encoder.bias": torch.zeros(2, dtype=torch.bfloat16)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2), "step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize(
    ("state", "left_out"),
    [
        (WEIGHTS, ()),
        ({"state_dict": WEIGHTS, "epoch": 3}, ("epoch",)),
        ({"model": OrderedDict(WEIGHTS), "optimizer": OPTIMIZER, "step": 3}, ("optimizer", "step")),
        ({"app": {"model": WEIGHTS, "optim": OPTIMIZER}}, ("optim",)),
        ({"model_state_dict": prefixed("module."), "rng": torch.ones(3)}, ("rng",)),
        (prefixed("_orig_mod."), ()),
    ],
    ids=["alone", "Lightning", "by hand", "nested", "DDP", "compiled"],
)
def test_the_model_is_found(state, left_out, zipped, tmp_path):
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    _, reader = registry.open_reader(tmp_path / "x.pt")
    with reader:
        assert set(reader.tensors) == set(WEIGHTS)
        assert reader.left_out == left_out
        assert (reader.read("encoder.weight") == 1).all()


def test_what_shards_hold_beside_the_model_is_said(tmp_path):
    places = {"encoder.weight": "pytorch_model-00001-of-00002.bin", "encoder.bias": "pytorch_model-00002-of-00002.bin"}
    for name, file in places.items():
        torch.save({"model": {name: WEIGHTS[name]}, "optimizer": OPTIMIZER, name: 1}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with registry.open_reader(tmp_path)[1] as reader:
        assert set(reader.tensors) == set(WEIGHTS)
        assert reader.left_out == ("optimizer", "encoder.weight", "encoder.bias")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": WEIGHTS, "state_dict": WEIGHTS}, "several models"),
        ({**prefixed("_orig_mod."), **WEIGHTS}, "are both called"),
        ({"model": {"a": "text"}}, "is a str, not a tensor"),
        ({"weights": WEIGHTS}, "is a dict, not a tensor"),
        ({"model": {0: torch.ones(2)}}, "state dict of tensors by name"),
    ],
)
def test_what_is_not_one_model(state, message, tmp_path):
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        registry.open_reader(tmp_path / "x.pt")


def test_a_state_that_holds_itself(tmp_path):
    state = {}
    state["model"] = state
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        registry.open_reader(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (("optimizer", "state", "0"), "optimizer/state/0"),
        (("app", "optim", "x"), "optim/x"),
        (("optimizer.state.layers.0.exp_avg",), "optimizer.state.layers.0.exp_avg"),
        (("step",), "step"),
        (("model", "optimizer"), None),
        (("model", "trainer_head.weight"), None),
        (("embed.weight",), None),
    ],
)
def test_what_belongs_to_training(path, rest):
    assert training_path(path) == rest
