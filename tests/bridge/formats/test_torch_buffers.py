"""What stands beside the weights: torch's tensors that a tree has no place for, and files."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from easytorch.bridge import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.torch_buffers import FILE_NAME
from easytorch.bridge.jobs import pipeline


@pytest.fixture
def with_buffer(tiny_torch):
    """The tiny classifier with the positions that old checkpoints of it hold, and no tree does."""
    state = load_file(tiny_torch / "model.safetensors")
    state["bert.embeddings.position_ids"] = np.arange(16)[None]
    save_file(state, tiny_torch / "model.safetensors", metadata={"format": "pt"})
    return tiny_torch, state


def assert_back(folder, state, tmp_path):
    convert(folder, tmp_path / "back", to="torch", verify=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(back[name].tobytes() == array.tobytes() for name, array in state.items())


@pytest.mark.parametrize("to", ["flax", "flax-safetensors", "orbax", "orbax-zarr", "easydel"])
def test_from_tree_to_tree(with_buffer, tmp_path, to):
    """Under the same names in another container, and under others'."""
    source, state = with_buffer
    convert(source, tmp_path / "flax", to="flax")
    report = convert(tmp_path / "flax", tmp_path / "there", to=to, verify=True)
    assert report.kept == ("bert.embeddings.position_ids",)
    assert_back(tmp_path / "there", state, tmp_path)


def test_repeats_that_torch_had(tmp_path):
    """A tied head that the torch file holds twice is written twice again, also by way of two containers."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 11,
        "n_positions": 6,
    }
    shapes = {"wte.weight": (11, 8), "wpe.weight": (6, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    for name, shape in {
        "attn.c_attn": (8, 24),
        "attn.c_proj": (8, 8),
        "mlp.c_fc": (8, 32),
        "mlp.c_proj": (32, 8),
    }.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    for name in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{name}.weight": (8,), f"h.0.{name}.bias": (8,)}
    rng = np.random.default_rng(20261122)
    state = {f"transformer.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"].copy()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "gpt2" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "gpt2", tmp_path / "flax", to="flax")
    convert(tmp_path / "flax", tmp_path / "orbax", to="orbax", verify=True)
    assert_back(tmp_path / "orbax", state, tmp_path)


def test_verify_looks_beside(with_buffer, tmp_path, monkeypatch):
    source, _ = with_buffer
    convert(source, tmp_path / "flax", to="flax")

    def write_wrong(folder, arrays, tied):
        arrays = {name: array + 1 for name, array in arrays.items()}
        save_file(arrays, folder / FILE_NAME, metadata={"format": "pt", "tied": json.dumps(sorted(tied))})

    monkeypatch.setattr(pipeline, "write_torch_buffers", write_wrong)
    with pytest.raises(CheckpointError, match=r"position_ids' does not come back"):
        convert(tmp_path / "flax", tmp_path / "orbax", to="orbax", verify=True)
    monkeypatch.setattr(pipeline, "write_torch_buffers", lambda *given: None)
    with pytest.raises(CheckpointError, match=r"position_ids' does not come back"):
        convert(tmp_path / "flax", tmp_path / "orbax", to="orbax", verify=True)
    assert not (tmp_path / "orbax").exists()


def test_a_weight_file_among_anything(tiny_torch, tmp_path):
    """Of a folder that is no model's, as of downloads, only what models have goes along; of a model's folder all."""
    lone = tmp_path / "downloads"
    (lone / "private").mkdir(parents=True)
    for name in ("tokenizer.json", "letter.txt", "film.mp4", "private/keys.json"):
        (lone / name).write_text("{}")
    (tiny_torch / "model.safetensors").rename(lone / "x.safetensors")
    convert(lone / "x.safetensors", tmp_path / "new", to="flax", config=tiny_torch / "config.json")
    assert {path.name for path in (tmp_path / "new").rglob("*")} == {
        "config.json",
        "flax_model.msgpack",
        "tokenizer.json",
    }
    (tiny_torch / "config.json").rename(lone / "config.json")
    convert(lone / "x.safetensors", tmp_path / "whole", to="flax")
    assert {path.name for path in (tmp_path / "whole").rglob("*")} >= {"letter.txt", "film.mp4", "keys.json"}
