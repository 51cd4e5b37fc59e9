"""Flax names for any model: each kind of module against flax.linen's, whole families there and back bit for bit."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax import linen
from safetensors.torch import load_file
from torch import nn

from easytorch.bridge.convert import convert
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.names.architecture import architecture_like
from easytorch.bridge.names.flax_convention import convention_rules
from easytorch.bridge.names.flax_leaves import is_statistic, leaf_of
from easytorch.bridge.rules.table import compile_rules
from easytorch.bridge.rules.transforms import get_transform

_spec = importlib.util.spec_from_file_location("convention_cases", Path(__file__).parents[1] / "convention_cases.py")
assert _spec is not None and _spec.loader is not None
cases: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


def leaves_of(module: nn.Module) -> dict[str, np.ndarray]:
    """The module's state by Flax path, as the convention lays it out."""
    modules = dict(module.named_modules())
    leaves = {}
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            path, transform = leaf_of(name, modules[name.rpartition(".")[0]], tensor.dim())
            head = "batch_stats/" if is_statistic(name) else "params/"
            leaves[head + path] = get_transform(transform).to_flax([tensor.numpy()])
    return leaves


def channels_last(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 1, -1)


def same(array: np.ndarray) -> np.ndarray:
    return array


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if name.endswith("running_var") else tensor.uniform_(-1, 1)
    return module.eval()


# torch module, what flax.linen calls it, the shape of an input, how torch's inputs and outputs lie in Flax.
KINDS: dict[str, tuple[nn.Module, linen.Module, tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = {
    "linear": (nn.Linear(3, 5), linen.Dense(5), (2, 3), same),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2), linen.Conv(6, (3,), 2, padding="VALID"), (2, 4, 9), channels_last),
    "conv2d": (nn.Conv2d(4, 6, (3, 2)), linen.Conv(6, (3, 2), padding="VALID"), (2, 4, 7, 8), channels_last),
    "conv3d": (nn.Conv3d(2, 3, (3, 2, 1)), linen.Conv(3, (3, 2, 1), padding="VALID"), (2, 2, 5, 6, 7), channels_last),
    "grouped": (
        nn.Conv2d(4, 6, 3, groups=2),
        linen.Conv(6, (3, 3), padding="VALID", feature_group_count=2),
        (2, 4, 7, 7),
        channels_last,
    ),
    "depthwise": (
        nn.Conv1d(4, 4, 3, groups=4),
        linen.Conv(4, (3,), padding="VALID", feature_group_count=4),
        (2, 4, 9),
        channels_last,
    ),
    "conv_transpose1d": (
        nn.ConvTranspose1d(4, 6, 3, stride=2),
        linen.ConvTranspose(6, (3,), (2,), padding="VALID", transpose_kernel=True),
        (2, 4, 9),
        channels_last,
    ),
    "conv_transpose2d": (
        nn.ConvTranspose2d(4, 6, (3, 2), stride=2),
        linen.ConvTranspose(6, (3, 2), (2, 2), padding="VALID", transpose_kernel=True),
        (2, 4, 5, 6),
        channels_last,
    ),
    "layer_norm": (nn.LayerNorm(8), linen.LayerNorm(epsilon=1e-5), (2, 3, 8), same),
    "rms_norm": (nn.RMSNorm(8, eps=1e-6), linen.RMSNorm(epsilon=1e-6), (2, 3, 8), same),
    "group_norm": (nn.GroupNorm(2, 8, eps=1e-6), linen.GroupNorm(2, epsilon=1e-6), (2, 8, 5), channels_last),
    "batch_norm": (
        nn.BatchNorm2d(4),
        linen.BatchNorm(use_running_average=True, epsilon=1e-5),
        (2, 4, 3, 3),
        channels_last,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_computes_in_flax_what_it_does_in_torch(kind: str) -> None:
    module, flax_module, shape, to_flax = KINDS[kind]
    module = randomised(module)
    given = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(given)).numpy()
    found = flax_module.apply(nested(leaves_of(module)), to_flax(given))
    np.testing.assert_allclose(found, to_flax(expected), rtol=1e-5, atol=1e-5)


def test_an_embedding_is_looked_up_in_flax_as_in_torch() -> None:
    module = randomised(nn.Embedding(7, 3))
    ids = np.array([[0, 6], [3, 3]])
    found = linen.Embed(7, 3).apply(nested(leaves_of(module)), ids)
    np.testing.assert_array_equal(found, module(torch.from_numpy(ids)).detach().numpy())


def test_conv1d_of_gpt2_is_stored_out_by_in() -> None:
    """FlaxConv1D of transformers 4.57 holds (features, inputs) and multiplies by the transpose."""
    module = randomised(transformers.pytorch_utils.Conv1D(5, 3))
    leaves = leaves_of(module)
    given = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    found = given @ leaves["params/kernel"].T + leaves["params/bias"]
    np.testing.assert_allclose(found, module(torch.from_numpy(given)).detach().numpy(), rtol=1e-6, atol=1e-6)


def test_weight_norm_is_g_and_v_of_both_ages() -> None:
    """What FlaxConvWithWeightNorm of transformers 4.57 computes: v scaled to the length g along all but one axis."""
    module = randomised(nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), name="weight", dim=2))
    leaves = leaves_of(module)
    assert set(leaves) == {"params/bias", "params/weight_g", "params/weight_v"}
    g, v = leaves["params/weight_g"], leaves["params/weight_v"]
    kernel = (g * v / np.sqrt((v**2).sum((0, 1), keepdims=True))).transpose(2, 1, 0)
    given = np.random.default_rng(0).normal(size=(2, 4, 9)).astype(np.float32)
    flax = linen.Conv(6, (3,), padding="VALID")
    found = flax.apply({"params": {"kernel": kernel, "bias": leaves["params/bias"]}}, channels_last(given))
    with torch.no_grad():
        expected = channels_last(module(torch.from_numpy(given)).numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def saved(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A random model of transformers saved there, in bfloat16 where it is a matrix, as its file holds it."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(-1, 1)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_there_and_back(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    convert(folder / "torch", folder / "flax", to="flax")
    convert(folder / "flax", folder / "again", to="torch")
    again = load_file(folder / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", cases.LANGUAGE)
def test_language_models_come_back_bit_for_bit(family: str, tie: bool, tmp_path: Path) -> None:
    name, settings = cases.LANGUAGE[family]
    assert_there_and_back(tmp_path, saved(tmp_path / "torch", name, {**settings, "tie_word_embeddings": tie}))


@pytest.mark.parametrize("family", cases.OTHERS)
def test_other_models_come_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    assert_there_and_back(tmp_path, saved(tmp_path / "torch", *cases.OTHERS[family]))


def test_experts_are_a_leaf_each_also_from_several_shards(tmp_path: Path) -> None:
    name, settings = cases.LANGUAGE["mixtral"]
    weights = saved(tmp_path / "torch", name, settings)
    getattr(transformers, name).from_pretrained(tmp_path / "torch").save_pretrained(
        tmp_path / "sharded", max_shard_size="2KB"
    )
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for folder in ("torch", "sharded"):
        convert(tmp_path / folder, tmp_path / f"{folder}-flax", to="flax", max_shard_size="3KB")
        leaves = flat(load_tree(tmp_path / f"{folder}-flax"))
        for expert in range(3):
            path, torch_name = "block_sparse_moe/experts", "block_sparse_moe.experts"
            found = leaves[f"model/layers/0/{path}/{expert}/w1/kernel"]
            np.testing.assert_array_equal(found.T, weights[f"model.layers.0.{torch_name}.{expert}.w1.weight"])
        assert leaves["model/layers/0/block_sparse_moe/gate/kernel"].shape == (16, 3)
    convert(tmp_path / "sharded-flax", tmp_path / "again", to="torch")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_stored_as_memory_holds_them_are_read_by_their_hub_names(family: str, tmp_path: Path) -> None:
    name, settings = cases.LANGUAGE[family]
    saved(tmp_path / "torch", name, settings)
    model = getattr(transformers, name).from_pretrained(tmp_path / "torch", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    model.save_pretrained(tmp_path / "hub")
    assert any(key.endswith("gate_up_proj") for key in load_file(tmp_path / "memory" / "model.safetensors"))
    for folder in ("memory", "hub"):
        convert(tmp_path / folder, tmp_path / f"{folder}-flax", to="flax", verify=True)
    found, expected = (flat(load_tree(tmp_path / f"{folder}-flax")) for folder in ("memory", "hub"))
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def table_of(name: str, settings: dict[str, Any], given: tuple[str, ...] = ()) -> Any:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**settings))
    return compile_rules(convention_rules(architecture_like(model).names, given))


def leaf_in(table: Any, name: str) -> str | None:
    """Where a torch tensor of any age stands in Flax."""
    modern = next(iter(table.torch_names([name])))
    found = table.torch_rule(modern)
    return None if found is None else found[0].flax.fill(found[2])


@pytest.mark.parametrize(
    ("family", "old", "path"),
    [
        (
            "wavlm",
            "wavlm.encoder.pos_conv_embed.conv.weight_g",
            "wavlm/encoder/pos_conv_embed/conv/weight_g",
        ),
        (
            "llava",
            "model.language_model.layers.0.self_attn.q_proj.weight",
            "language_model/model/layers/0/self_attn/q_proj/kernel",
        ),
        (
            "llava",
            "vision_tower.vision_model.embeddings.class_embedding",
            "vision_tower/vision_model/embeddings/class_embedding",
        ),
        (
            "deberta-v2",
            "deberta.embeddings.LayerNorm.gamma",
            "deberta/embeddings/LayerNorm/scale",
        ),
    ],
)
def test_checkpoints_of_every_age_are_read(family: str, old: str, path: str) -> None:
    assert leaf_in(table_of(*cases.OTHERS[family], given=(old,)), old) == path


def test_a_family_may_have_a_point_in_its_name() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"embed_dim": 16, "layers": 1, "attention_heads": 2, "ffn_dim": 16, "vocab_size": 30}
    table = table_of("Kosmos2_5Model", {"text_config": text, "vision_config": small})
    found = "text_model.model.embed_tokens.weight"
    assert leaf_in(table, found) == "text_model/model/embed_tokens/embedding"
    assert Config(Path("config.json"), {"model_type": "kosmos-2.5"}).model_type == "kosmos-2.5"


def test_rotary_tables_of_old_checkpoints_are_kept_beside() -> None:
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert table_of(*cases.LANGUAGE["qwen2"], given=(old,)).is_buffer(old)


def test_another_head_of_the_family_is_known_only_where_a_checkpoint_has_it() -> None:
    name, settings = cases.LANGUAGE["qwen2"]
    assert leaf_in(table_of(name, settings), "score.weight") is None
    assert leaf_in(table_of(name, settings, given=("score.weight",)), "score.weight") == "score/kernel"
    assert table_of(name, settings, given=("score/kernel",)).flax_rule("score/kernel") is not None


@pytest.mark.parametrize(
    ("family", "key"),
    [("mixtral", "num_local_experts"), ("deepseek_v3", "n_routed_experts"), ("mpt", "n_layers"), ("qwen2_vl", "depth")],
)
def test_a_count_beyond_the_checkpoint_is_refused_before_anything_is_built(
    family: str, key: str, tmp_path: Path
) -> None:
    name, settings = (cases.LANGUAGE | cases.OTHERS)[family]
    saved(tmp_path / "torch", name, settings)
    config = tmp_path / "torch" / "config.json"
    config.write_text(re.sub(rf'"{key}": \d+', f'"{key}": 1000000000', config.read_text()))
    with pytest.raises(CheckpointError, match=key):
        convert(tmp_path / "torch", tmp_path / "flax", to="flax")


def test_a_layer_too_many_is_an_error(tmp_path: Path) -> None:
    name, settings = cases.LANGUAGE["phi"]
    saved(tmp_path / "torch", name, settings)
    config = tmp_path / "torch" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(CheckpointError, match=r"layers\.1\."):
        convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    assert not (tmp_path / "flax").exists()
