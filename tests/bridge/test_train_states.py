"""Training states with batch statistics and other trees beside the parameters: in memory, in msgpack, through Orbax."""

from __future__ import annotations

import json

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from flax import linen, nnx, struct
from flax.training.train_state import TrainState
from safetensors.torch import load_file

from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict
from easytorch.bridge.trees import flat, nested
from easytorch.protocol import flax_trees

CONFIG = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
)


class WithStatistics(TrainState):
    """What flax's ImageNet example trains."""

    batch_stats: dict
    ema_params: dict
    dropout_rng: jax.Array


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(CONFIG)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def state(resnet):
    variables = jax.tree.map(jnp.asarray, flax_trees.to_flax(resnet))
    return WithStatistics.create(
        apply_fn=lambda: None,
        params=variables["params"],
        tx=optax.adamw(1e-3),
        batch_stats=variables["batch_stats"],
        ema_params=jax.tree.map(lambda leaf: leaf + 1, variables["params"]),
        dropout_rng=jax.random.key(0),
    ).replace(step=7)


def assert_same(found, expected, shift=0):
    statistics = ("running_mean", "running_var")
    names = {name for name in expected if not name.endswith("num_batches_tracked")}
    assert names <= set(found)
    for name in names:
        other = expected[name] if name.endswith(statistics) else expected[name] + shift
        assert torch.equal(found[name], other), name


def test_in_memory(resnet, state):
    expected = resnet.state_dict()
    for given in (state, {"state": state, "epoch": 3}, flax.serialization.to_state_dict(state)):
        model = flax_trees.from_flax(transformers.ResNetForImageClassification, CONFIG, given)
        assert_same(model.state_dict(), expected)


def _as_msgpack(state, folder):
    raw = state.replace(dropout_rng=jax.random.key_data(state.dropout_rng))
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(raw))
    return folder


def _as_orbax(state, folder):
    raw = state.replace(dropout_rng=jax.random.key_data(state.dropout_rng))
    with ocp.CheckpointManager(folder) as manager:
        for step in (7, 20):
            shifted = jax.tree.map(lambda leaf, by=step - 7: leaf + by, raw.params)
            manager.save(step, args=ocp.args.StandardSave(raw.replace(params=shifted, step=step)))
        manager.wait_until_finished()
    return folder


@pytest.mark.parametrize("write", [_as_msgpack, _as_orbax], ids=["msgpack", "orbax"])
def test_from_files(resnet, state, tmp_path, write):
    source = tmp_path / "run"
    source.mkdir()
    write(state, source)
    (source / "config.json").write_text(
        json.dumps({**CONFIG.to_dict(), "architectures": ["ResNetForImageClassification"]})
    )
    last = 20 if write is _as_orbax else 7
    report = convert(source, tmp_path / "last", to="torch", verify=True)
    assert_same(load_file(tmp_path / "last/model.safetensors"), resnet.state_dict(), last - 7)
    notes = " ".join(report.notes)
    assert f"step {last}" in notes and "params" in notes and "ema_params" in notes and "opt_state" in notes
    report = convert(source, tmp_path / "ema", to="torch", params_key="ema_params")
    assert_same(load_file(tmp_path / "ema/model.safetensors"), resnet.state_dict(), 1)
    assert "`ema_params`" in " ".join(report.notes)
    with pytest.raises(CheckpointError, match="no tree called 'emma'"):
        convert(source, tmp_path / "none", to="torch", params_key="emma")
    if write is _as_orbax:
        report = convert(source, tmp_path / "first", to="torch", step=7)
        assert_same(load_file(tmp_path / "first/model.safetensors"), resnet.state_dict())
        assert "step 7" in " ".join(report.notes)
        with pytest.raises(CheckpointError, match=r"no step 8.*7, 20"):
            convert(source, tmp_path / "none", to="torch", step=8)
    else:
        with pytest.raises(CheckpointError, match="no steps"):
            convert(source, tmp_path / "none", to="torch", step=7)


@struct.dataclass
class OwnState:
    params: dict
    opt_state: tuple
    step: int
    name: str = struct.field(pytree_node=False, default="x")


def test_states_of_ones_own():
    rules = (("out.weight", "out/kernel", "linear"), ("out.bias", "out/bias", "identity"))
    params = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    opt_state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"out": params})
    found = tree_to_state_dict(OwnState(params={"out": params}, opt_state=opt_state, step=3), rules)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"out.weight": (3, 2), "out.bias": (3,)}
    np.testing.assert_array_equal(found["out.weight"].numpy(), np.asarray(params["kernel"]).T)
    with pytest.raises(TypeError, match="int is no tree of arrays; give a dict, a TrainState"):
        tree_to_state_dict(3, rules)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


BLOCK_RULES = (
    ("layers.{i}.weight", "params/layers/{i}/kernel", "linear"),
    ("layers.{i}.bias", "params/layers/{i}/bias", "identity"),
    ("norm.weight", "params/norm/scale", "identity"),
    ("norm.bias", "params/norm/bias", "identity"),
    ("norm.running_mean", "batch_stats/norm/mean", "identity"),
    ("norm.running_var", "batch_stats/norm/var", "identity"),
)


def test_nnx_lists_and_statistics_go_back():
    module = Blocks(nnx.Rngs(0))
    tensors = tree_to_state_dict(module, BLOCK_RULES)
    assert len(tensors) == 8
    changed = {name: tensor + number + 1 for number, (name, tensor) in enumerate(tensors.items())}
    nnx.update(module, state_dict_to_tree(changed, BLOCK_RULES, framework="jax", like=module))
    for name, tensor in tree_to_state_dict(module, BLOCK_RULES).items():
        assert torch.equal(tensor, changed[name]), name
    optimizer = nnx.ModelAndOptimizer(module, optax.adam(1e-3))
    assert set(tree_to_state_dict(optimizer, BLOCK_RULES)) == set(changed)
    with pytest.raises(CheckpointError, match=r"layers/1/kernel.*is missing"):
        fewer = {name: tensor for name, tensor in changed.items() if name != "layers.1.weight"}
        state_dict_to_tree(fewer, BLOCK_RULES, like=module)
    with pytest.raises(CheckpointError, match="has no place"):
        state_dict_to_tree({**changed, "layers.2.bias": torch.ones(4)}, BLOCK_RULES, like=module)


def test_paths_of_a_state_stay_flat():
    assert flat(nested({"a/0": 1, "a/1": 2})) == {"a/0": 1, "a/1": 2}
