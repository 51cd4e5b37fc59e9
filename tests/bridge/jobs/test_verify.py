"""What `convert --verify` notices, and what it says of models whose outputs it cannot compare."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.core.config import read_config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.jobs import verify, verify_source
from easytorch.bridge.state import load_torch_state_dict

TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}
LLAMA = TINY | {"num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "bert": transformers.BertConfig(**TINY),
    "llama": transformers.LlamaConfig(**LLAMA),
    "mistral": transformers.MistralConfig(**LLAMA, head_dim=8),
    "gpt2": transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=50),
}


def test_other_weights_are_noticed(saved_torch, tmp_path):
    folder = saved_torch(CONFIGS["bert"])
    convert(folder, tmp_path / "flax", to="flax")
    state = load_file(folder / "model.safetensors")
    state["encoder.layer.1.output.dense.weight"][0, 0] += 0.5
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="computes something else in torch and in jax"):
        verify.compare_outputs(folder, tmp_path / "flax", read_config(folder))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type 'linear'"),
        ("mistral", {"sliding_window": 4}, "a sliding window"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scores scaled by layer"),
        ("bert", {"model_type": "albert"}, "no jax forward of 'albert'"),
    ],
)
def test_what_the_forward_does_not_carry_is_said(saved_torch, name, change, reason):
    folder = saved_torch(CONFIGS[name])
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = verify.compare_outputs(folder, folder, read_config(folder))
    assert found.difference is None and reason in (found.note or "")


@pytest.mark.parametrize(
    ("to", "lost"),
    [
        ("flax", "lm_head.weight"),
        ("maxtext", "lm_head.weight"),
        ("gguf", "model.norm.weight"),
        ("easydel-msgpack", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_a_plan_drops_is_noticed(tmp_path, monkeypatch, to, lost):
    """Verifying looks for the source's tensors, not for what was meant to be written."""
    model = transformers.LlamaForCausalLM(CONFIGS["llama"])
    model.save_pretrained(tmp_path / "torch")
    from easytorch.bridge import checkpoint as checkpoints

    plan = checkpoints.plan_from_torch

    def dropping(tensors, *args, **kwargs):
        # As if the tensor next to it had been stored in its place.
        made = plan(tensors, *args, **kwargs)
        like = next(one for one, info in tensors.items() if info.shape == tensors[lost].shape and one != lost)
        changed = [
            replace(step, sources=tuple(like if name == lost else name for name in step.sources)) for step in made.steps
        ]
        made.steps[:] = changed
        return made

    monkeypatch.setattr(checkpoints, "plan_from_torch", dropping)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(tmp_path / "torch")
    with pytest.raises(CheckpointError, match=rf"'{lost}' comes back with other values from what was written"):
        convert(tmp_path / "torch", tmp_path / "out", to=to, verify=True)
    assert not (tmp_path / "out").exists()


def test_outputs_of_nan_on_one_side_are_a_difference(saved_torch, tmp_path, monkeypatch):
    folder = saved_torch(CONFIGS["bert"])
    convert(folder, tmp_path / "flax", to="flax")
    outputs = verify._jax_outputs

    def spoiled(*args):
        found, with_head = outputs(*args)
        found = np.array(found)
        found.flat[3] = np.nan
        return found, with_head

    monkeypatch.setattr(verify, "_jax_outputs", spoiled)
    with pytest.raises(CheckpointError, match="outputs differ by nan"):
        verify.compare_outputs(folder, tmp_path / "flax", read_config(folder))


def test_every_tensor_is_read_back(tmp_path):
    """One that was not written, one of other values, one of another dtype."""
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.arange(3, dtype=np.float32)}
    save_arrays(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    format_ = registry.find(tmp_path, prefer="torch")[0]
    assert verify.wrong_tensor(tmp_path, format_, _Given(arrays)) is None
    for changed in ({"c": arrays["a"]}, {"b": arrays["b"] + 1}, {"b": arrays["b"].astype(np.float16)}):
        assert verify.wrong_tensor(tmp_path, format_, _Given({**arrays, **changed})) == next(iter(changed))


class _Given:
    """Arrays as an open checkpoint."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.tensors = {name: TensorInfo(name, one.shape, one.dtype.name) for name, one in arrays.items()}

    def read(self, name):
        return self.arrays[name]


@pytest.mark.parametrize("rounds", [False, True])
def test_what_counts_as_the_same(rounds):
    one = np.ones((2, 3), np.float32)
    tolerance = verify_source._COMPUTED
    assert verify_source._same(one, one * np.float32(1 + tolerance / 2), tolerance, rounds)
    for other in (one[:1], one[0], one.T, one[None], np.ones((2, 1), np.float32), one * np.float32(1 + 8 * tolerance),
                  np.where(np.eye(2, 3), np.nan, one).astype(np.float32), one.astype(np.int32)):  # fmt: skip
        assert not verify_source._same(one, other, tolerance, rounds), other
    large = one * 1000  # the tolerance is relative to the largest number
    assert verify_source._same(large, large + np.float32(300 * tolerance), tolerance, rounds)
    assert not verify_source._same(large, large + np.float32(3000 * tolerance), tolerance, rounds)


def test_a_leaf_that_makes_no_tensor_is_an_error(tmp_path, monkeypatch):
    model = transformers.LlamaForCausalLM(CONFIGS["llama"])
    model.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    from easytorch.bridge import checkpoint as checkpoints

    plan = checkpoints.plan_to_torch

    def dropping(*args, **kwargs):
        made = plan(*args, **kwargs)
        made.steps[:] = [step for step in made.steps if step.targets[0].name != "model.norm.weight"]
        return made

    monkeypatch.setattr(checkpoints, "plan_to_torch", dropping)
    with pytest.raises(CheckpointError, match=r"model/norm/weight.*would be lost"):
        load_torch_state_dict(tmp_path / "flax")
