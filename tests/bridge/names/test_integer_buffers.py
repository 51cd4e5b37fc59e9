"""Buffers of integers that hold data: there and back in every way, and named where a checkpoint lacks one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder
from transformers.models.swin.modeling_swin import SwinModel

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.names.computed_buffers import is_computed
from easytorch.protocol import conversion

# The first layer's experts are chosen by a table of tokens.
SETTINGS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 30,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "pad_token_id": 0,
}
TABLE = "model.layers.0.mlp.gate.tid2eid"


def model(seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    made = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**SETTINGS)).eval()
    table = made.get_buffer(TABLE)
    table.copy_(torch.randint(0, 4, table.shape))
    return made


def saved(folder: Path) -> dict[str, torch.Tensor]:
    model().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def table_of(weights: dict[str, torch.Tensor]) -> str:
    (name,) = (name for name, tensor in weights.items() if not tensor.is_floating_point())
    return name


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_table_of_integers_comes_back_bit_for_bit(dtype: str | None, tmp_path: Path) -> None:
    weights = saved(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax", dtype=dtype, verify=True)
    leaves = {path: leaf for path, leaf in flat(load_tree(tmp_path / "flax")).items() if path.endswith("tid2eid")}
    (leaf,) = leaves.values()
    np.testing.assert_array_equal(leaf, weights[table_of(weights)])
    convert(tmp_path / "flax", tmp_path / "again", to="torch", verify=True)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    name = table_of(weights)
    assert again[name].dtype == torch.int64 and torch.equal(again[name], weights[name])


def test_a_table_of_integers_comes_back_in_memory() -> None:
    stock = model()
    tree = conversion.to_flax(stock)
    again = conversion.from_flax(type(stock), stock.config, tree)
    for name, tensor in stock.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    rest = {path: leaf for path, leaf in flat(tree).items() if not path.endswith("tid2eid")}
    with pytest.raises(CheckpointError, match="tid2eid"):
        conversion.from_flax(type(stock), stock.config, nested(rest))


@pytest.mark.parametrize("target", ["flax", "orbax", "easydel"])
def test_a_checkpoint_without_its_table_of_integers_is_refused(target: str, tmp_path: Path) -> None:
    weights = saved(tmp_path / "torch")
    name = table_of(weights)
    del weights[name]
    save_file(weights, tmp_path / "torch" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="tid2eid"):
        convert(tmp_path / "torch", tmp_path / "out", to=target)
    assert not (tmp_path / "out").exists()


def test_a_tree_with_the_table_in_the_file_beside_it_is_read(tmp_path: Path) -> None:
    """What earlier versions wrote: integers were no leaves."""
    weights = saved(tmp_path / "torch")
    name = table_of(weights)
    convert(tmp_path / "torch", tmp_path / "flax", to="flax-safetensors")
    file = tmp_path / "flax" / "model.safetensors"
    leaves = load_file(file)
    (path,) = (path for path in leaves if path.endswith("tid2eid"))
    kept = leaves.pop(path)
    save_file(leaves, file, {"format": "flax"})
    save_file({name: kept}, tmp_path / "flax" / "torch_buffers.safetensors", {"format": "pt", "tied": json.dumps([])})
    convert(tmp_path / "flax", tmp_path / "again", to="torch")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], weights[name])


def test_what_a_class_computes_may_be_missing() -> None:
    """Indices, counters and masks; not tables, whatever their dtype."""
    norm, swin = nn.BatchNorm1d(2), SwinModel(transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[1]))
    for module in (norm, swin):
        integers = {name: one for name, one in module.state_dict().items() if not one.is_floating_point()}
        assert all(is_computed(name, one) for name, one in integers.items())
    assert not is_computed("running_mean", norm.running_mean)
    assert is_computed("semantic.layers.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert not is_computed("layers.0.attn.bias", torch.ones(4))
    text = transformers.Gemma4TextConfig(
        hidden_size=8, vocab_size=12, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, num_centroids=3, centroid_intermediate_top_k=1)
    embedder = Gemma4AssistantMaskedEmbedder(config)
    assert not is_computed("masked_embedding.token_ordering", embedder.token_ordering)
