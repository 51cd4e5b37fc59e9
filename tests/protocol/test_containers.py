"""`AutoModel*.from_pretrained` of everything the bridge reads, from folders and from the Hub's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

import easytorch
from easytorch.bridge import checkpoint, state
from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.jobs.targets import TARGETS
from easytorch.protocol import checkpoint_files
from easytorch.protocol.checkpoint_files import flax_file

GPT2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2)
BERT = BertConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=40,
)
# Containers of the same names: other programs' have a test each where their names are tested.
CONTAINERS = [name for name, target in TARGETS.items() if target.scheme == "flax"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A torch checkpoint of a native family and of another, and each in every container of Flax's names."""
    root = tmp_path_factory.mktemp("containers")
    torch.manual_seed(0)
    models = {"gpt2": GPT2LMHeadModel(GPT2), "bert": easytorch.AutoModelForMaskedLM.from_config(BERT)}
    for family, model in models.items():
        model.save_pretrained(root / family / "torch")
        for name in CONTAINERS:
            convert(root / family / "torch", root / family / name, to=name)
    return root


AUTO = {"gpt2": easytorch.AutoModelForCausalLM, "bert": easytorch.AutoModelForMaskedLM}


def same_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kwargs", [{}, {"from_flax": True}], ids=str)
def test_a_tree_is_classified_and_opened_once(folders, monkeypatch, kwargs) -> None:
    asked = {"classify": 0, "open": 0}

    def counting(name: str, function):
        def call(*args, **kwargs):
            asked[name] += 1
            return function(*args, **kwargs)

        return call

    classified = counting("classify", registry.classify)
    for module in (registry, checkpoint_files):
        monkeypatch.setattr(module, "classify", classified)
    opened = counting("open", checkpoint.open_checkpoint)
    for module in (checkpoint_files, state):
        monkeypatch.setattr(module, "open_checkpoint", opened)
    easytorch.AutoModelForCausalLM.from_pretrained(folders / "gpt2" / "flax", **kwargs)
    assert asked == {"classify": 1, "open": 1}


@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_loads_by_itself_and_when_asked_for(folders, family, name) -> None:
    auto, folder = AUTO[family], folders / family / name
    expected = auto.from_pretrained(folders / family / "torch")
    for kwargs in ({}, {"from_flax": True}):
        same_weights(auto.from_pretrained(folder, **kwargs), expected)
    assert auto.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    if family == "bert":
        same_weights(type(expected).from_pretrained(folder), expected)
    else:
        assert auto.from_pretrained(folder).generation_config.eos_token_id == 2


@pytest.mark.parametrize("name", CONTAINERS)
def test_torch_weights_come_first_unless_flax_is_asked_for(folders, name, tmp_path) -> None:
    if name == "flax-safetensors":
        pytest.skip("has the file names of torch's")
    shutil.copytree(folders / "gpt2" / name, tmp_path / "both")
    other = GPT2LMHeadModel(GPT2)
    other.save_pretrained(tmp_path / "both")
    load = easytorch.AutoModelForCausalLM.from_pretrained
    same_weights(load(tmp_path / "both"), other)
    same_weights(load(tmp_path / "both", from_flax=True), load(folders / "gpt2" / "torch"))


def test_torch_files_are_no_flax_ones(folders) -> None:
    with pytest.raises(CheckpointError, match="from_flax=True needs"):
        easytorch.AutoModelForCausalLM.from_pretrained(folders / "gpt2" / "torch", from_flax=True)


@pytest.mark.parametrize("name", ["flax", "orbax"])
def test_a_name_on_the_hub(folders, name, tmp_path) -> None:
    """As it lies in the cache; nothing is asked of the network."""
    revision = "0" * 40
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / revision
    shutil.copytree(folders / "gpt2" / name, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(revision)
    where = {"cache_dir": tmp_path, "local_files_only": True}
    expected = easytorch.AutoModelForCausalLM.from_pretrained(folders / "gpt2" / "torch")
    for kwargs in ({}, {"from_flax": True}):
        same_weights(easytorch.AutoModelForCausalLM.from_pretrained("someone/tiny", **where, **kwargs), expected)
    with pytest.raises(CheckpointError, match=r"someone/absent.*from_flax=True needs"):
        flax_file("someone/absent", True, where)
    assert flax_file("someone/absent", False, where) is None
    (snapshot / "model.safetensors").write_bytes((folders / "gpt2" / "torch" / "model.safetensors").read_bytes())
    assert flax_file("someone/tiny", False, where) is None


def test_a_checkpoint_without_a_config_that_its_names_tell(tmp_path) -> None:
    """MaxText, Gemma and T5X write none; where shapes do not tell all of it, `config=` does."""
    config = easytorch.AutoConfig.for_model(
        "gemma",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = easytorch.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "gemma", to="gemma")
    (tmp_path / "gemma" / "config.json").unlink()
    found = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "gemma")
    assert found.config.model_type == "gemma" and found.config.num_hidden_layers == 2
    same_weights(found, model)
    same_weights(easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "gemma", config=config), model)


def test_a_file_that_is_not_whole_is_named(folders, tmp_path) -> None:
    shutil.copytree(folders / "gpt2" / "flax", tmp_path / "cut")
    file = tmp_path / "cut" / "flax_model.msgpack"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"flax_model\.msgpack"):
        easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
