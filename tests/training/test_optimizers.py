"""The optimizers by their names: what their libraries compute, resumed bit for bit, refused where they cannot be."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.training import optimizers, train
from easytorch.training.config import OPTIMIZERS
from easytorch.training.optimizers import make_optimizer, state_shapes
from easytorch.training.prepare import check_inputs

LION = pytest.mark.skipif(importlib.util.find_spec("lion_pytorch") is None, reason="lion-pytorch is not installed")
NAMES = [pytest.param(name, marks=LION) if name == "lion" else name for name in OPTIMIZERS]
TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_resumed_to_the_bit(settings, name, kind):
    config = settings(
        steps=4, save_every=2, eval_fraction=0.0, model=TINY, block_size=8, optimizer=name, checkpoint_format=kind
    )
    last = train(config).checkpoint
    expected = {path.name: load_file(path) for path in last.glob("*.safetensors")}
    assert expected
    shutil.rmtree(last)
    resumed = dataclasses.replace(config, resume=True)
    assert train(resumed).checkpoint == last
    for file, tensors in expected.items():
        assert_close(load_file(last / file), tensors, rtol=0, atol=0)
    other = dataclasses.replace(resumed, optimizer="muon" if name != "muon" else "adamw", steps=5)
    with pytest.raises(ValueError, match=rf"--optimizer is '{other.optimizer}', and it had '{name}'"):
        check_inputs(other, 1)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-4.* move (it|.*checkpoint-4) away"
    ):  # its state is another's
        train(dataclasses.replace(other, change=("optimizer", "steps")))


def gradients(model: torch.nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_librarys(settings, name):
    """The state of each is what `state_shapes` says, and Muon has the matrices between embedding and head."""
    config = settings(optimizer=name, learning_rate=0.02, weight_decay=0.3, beta1=0.8, beta2=0.9)
    make = torch.nn.Sequential(torch.nn.Embedding(5, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    model, other = make, torch.nn.Sequential(torch.nn.Embedding(5, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    model.get_output_embeddings = lambda: model[2]
    other.load_state_dict(model.state_dict())
    optimizer = make_optimizer(model, config)
    matrices = [other[0].weight, other[1].weight, other[2].weight]
    vectors = [other[1].bias, other[2].bias]
    settings_of = {"lr": 0.02, "betas": (0.8, 0.9)}
    if name == "muon":
        muon = torch.optim.Muon([other[1].weight], lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
        matrices.pop(1)
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    if name == "lion":
        from lion_pytorch import Lion

        expected = [Lion(groups, **settings_of)]
    elif name == "adafactor":
        expected = [torch.optim.Adafactor(groups, lr=0.02)]
    else:
        expected = [torch.optim.AdamW(groups, **settings_of), *([muon] if name == "muon" else [])]
    for _ in range(3):
        gradients(model), gradients(other)
        for one in (optimizer, *expected):
            one.step()
    assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
    for parameter in model.parameters():
        found = {key: tuple(value.shape) for key, value in optimizer.state[parameter].items()}
        assert found == state_shapes(optimizer, parameter)
    assert {float(group["weight_decay"]) for group in optimizer.param_groups} == {0.3, 0.0}


def test_stages_have_the_matrices_that_muon_has_of_the_whole_model(settings):
    """A stage before the last has no head: `make_optimizer` read its weight."""
    sizes = {**TINY, "num_hidden_layers": 2, "vocab_size": 8, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(**sizes)

    def matrices(*layers: int) -> list[str]:
        model = easytorch.AutoModelForCausalLM.from_config(config)
        if layers:
            model.keep_layers(*layers)
        optimizer = make_optimizer(model, settings(optimizer="muon"))
        return [name for name, one in model.named_parameters() if optimizer.is_muons(one)]

    assert matrices(0, 1) + matrices(1, 2) == matrices() and len(matrices()) == 2 * 7


def test_an_optimizer_that_is_not_there_is_named(settings, monkeypatch):
    with pytest.raises(ValueError, match=r"optimizer .* must be one of adamw, lion, muon, adafactor, got 'adam'"):
        settings(optimizer="adam")
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lion needs lion-pytorch: pip install .*train"):
        check_inputs(settings(optimizer="lion"), 1)


def test_the_state_counts_in_the_estimate(settings):
    estimate = {name: check_inputs(settings(optimizer=name, output=name), 1).notes[-1] for name in ("adamw", "muon")}
    assert "AdamW: 16 bytes" in estimate["adamw"] and "Muon: 16 bytes" in estimate["muon"]
