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
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.memory.tree import MemoryTree
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict
from easytorch.protocol import conversion

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
    variables = jax.tree.map(jnp.asarray, conversion.to_flax(resnet))
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
        model = conversion.from_flax(transformers.ResNetForImageClassification, CONFIG, given)
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


@struct.dataclass
class OwnModel:
    kernel: jax.Array
    bias: jax.Array
    act: object = struct.field(pytree_node=False, default=jnp.tanh)


def test_functions_of_ones_own_classes_are_no_weights():
    """What a class marks as no part of the tree is neither a leaf nor something that was left out."""
    own = OwnModel(kernel=jnp.ones((2, 3)), bias=jnp.ones(3))
    rules = (("out.weight", "out/kernel", "linear"), ("out.bias", "out/bias", "identity"))
    assert MemoryTree({"out": own}).tensors.keys() == {"out/kernel", "out/bias"}
    assert tree_to_state_dict({"out": own}, rules).keys() == {"out.weight", "out.bias"}
    state = TrainState.create(apply_fn=lambda: None, params={"out": own}, tx=optax.sgd(1e-3))
    assert tree_to_state_dict(state, rules).keys() == {"out.weight", "out.bias"}
    assert not {"apply_fn", "tx"} & {name.partition("/")[0] for name in MemoryTree(state).left_out}


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
    with pytest.raises(CheckpointError, match=r"layers\.1\.weight.*is missing"):
        fewer = {name: tensor for name, tensor in changed.items() if name != "layers.1.weight"}
        state_dict_to_tree(fewer, BLOCK_RULES, like=module)
    with pytest.raises(CheckpointError, match="has no place"):
        more = {"layers.2.bias": torch.ones(4), "layers.2.weight": torch.ones(4, 4)}
        state_dict_to_tree({**changed, **more}, BLOCK_RULES, like=module)


def _without_kinds(tree):
    """A nnx module's state as files hold it: nothing says which leaves are statistics."""
    return {
        str(key): _without_kinds(child)
        if isinstance(child, dict)
        else np.asarray(jax.random.key_data(child) if jnp.issubdtype(child.dtype, jax.dtypes.prng_key) else child)
        for key, child in tree.items()
    }


PLAIN_RULES = tuple((name, path.partition("/")[2], layout) for name, path, layout in BLOCK_RULES)


@pytest.mark.parametrize("kind", ["msgpack", "orbax"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("rules", [BLOCK_RULES, PLAIN_RULES], ids=["collections", "plain"])
def test_nnx_statistics_in_a_file(tmp_path, kind, values, rules):
    module = Blocks(nnx.Rngs(0))
    module.norm.mean[...] = jnp.arange(4.0)
    tree = _without_kinds(nnx.to_pure_dict(nnx.state(module)))
    if values:
        tree = nested({f"{path}/value": leaf for path, leaf in flat(tree).items()})
    if kind == "msgpack":
        (tmp_path / "run").mkdir()
        (tmp_path / "run/flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    else:
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / "run", tree)
    report = convert(tmp_path / "run", tmp_path / "out", to="torch", rules=rules)
    assert "2 arrays beside the parameters are left out (drop)" in " ".join(report.notes)
    found, expected = load_file(tmp_path / "out/model.safetensors"), tree_to_state_dict(module, BLOCK_RULES)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_nnx_resnet_in_a_file(resnet, tmp_path):
    """The family's own rules call the leaves `params/...` and `batch_stats/...`."""
    variables = conversion.to_flax(resnet)
    tree = nested({**flat(variables["params"]), **flat(variables["batch_stats"])})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    content = {**CONFIG.to_dict(), "architectures": ["ResNetForImageClassification"]}
    (tmp_path / "run/config.json").write_text(json.dumps(content))
    convert(tmp_path / "run", tmp_path / "out", to="torch", verify=True)
    assert_same(load_file(tmp_path / "out/model.safetensors"), resnet.state_dict())


@pytest.mark.parametrize("key", ["model_state", "flax_mutables"])
def test_statistics_in_a_tree_of_their_own(resnet, tmp_path, key):
    variables = conversion.to_flax(resnet)
    shifted = nested({path: leaf + 1 for path, leaf in flat(variables["params"]).items()})
    state = {"params": variables["params"], "ema_params": shifted, key: {"batch_stats": variables["batch_stats"]}}
    for name, given in {"run": state, "nested": {"train_state": state, "epoch": np.int32(3)}}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes({**given, "step": np.int32(1)}))
        content = {**CONFIG.to_dict(), "architectures": ["ResNetForImageClassification"]}
        (folder / "config.json").write_text(json.dumps(content))
        convert(folder, tmp_path / f"{name}-out", to="torch")
        assert_same(load_file(tmp_path / f"{name}-out/model.safetensors"), resnet.state_dict())
        convert(folder, tmp_path / f"{name}-ema", to="torch", params_key="ema_params")
        assert_same(load_file(tmp_path / f"{name}-ema/model.safetensors"), resnet.state_dict(), 1)


def test_paths_of_a_state_stay_flat():
    assert flat(nested({"a/0": 1, "a/1": 2})) == {"a/0": 1, "a/1": 2}


LLAMA = transformers.LlamaConfig(
    hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
)


def _llama():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(LLAMA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("chosen", [{}, {"step": 1}, {"step": 1, "params_key": "ema_params"}])
def test_the_outputs_of_what_was_chosen_are_compared(tmp_path, chosen):
    """Of a state with counters and optimizer, and not of the run's last step or its other tree."""
    params = jax.tree.map(jnp.asarray, conversion.to_flax(_llama()))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            trees = {
                "params": jax.tree.map(lambda leaf, by=step: leaf * by, params),
                "ema_params": jax.tree.map(lambda leaf, by=step: -leaf * by, params),
            }
            optimizer = optax.adam(1e-3).init(params)
            manager.save(step, args=ocp.args.StandardSave({**trees, "opt_state": optimizer, "step": np.int32(step)}))
        manager.wait_until_finished()
    content = {**LLAMA.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "run/config.json").write_text(json.dumps(content))
    report = convert(tmp_path / "run", tmp_path / "out", to="torch", verify=True, **chosen)
    assert report.outputs_difference is not None and report.outputs_difference < 1e-5, report.notes
    factor = -1 if "params_key" in chosen else 1 if "step" in chosen else 2
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["lm_head.weight"], factor * _llama().state_dict()["lm_head.weight"])


def test_what_is_dropped_is_not_compared(tmp_path):
    _llama().save_pretrained(tmp_path / "torch")
    folder = tmp_path / "torch"
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    report = convert(folder, tmp_path / "flax", to="flax", verify=True, drop=["lm_head.weight"])
    assert "would load what was dropped" in " ".join(report.notes)


@pytest.mark.parametrize("kind", ["torch", "orbax"])
def test_each_step_with_its_own_files(tmp_path, kind):
    """config.json and the tokenizer in the folders of the steps, as transformers' Trainer saves them."""
    model = _llama()
    for step in (1, 2):
        folder = tmp_path / f"run/checkpoint-{step}"
        if kind == "torch":
            model.save_pretrained(folder)
        else:
            folder.parent.mkdir(exist_ok=True)
            model.save_pretrained(tmp_path / f"{step}")
            convert(tmp_path / f"{step}", folder, to="orbax")
        (folder / "vocab.txt").write_text(f"of {step}")
    (tmp_path / "run/README.md").write_text("of the run")
    report = convert(tmp_path / "run", tmp_path / "last", to="flax" if kind == "torch" else "torch")
    assert "step 2 is read, of 1, 2" in report.notes and (tmp_path / "last/vocab.txt").read_text() == "of 2"
    convert(tmp_path / "run", tmp_path / "out", to="flax" if kind == "torch" else "torch", step=1)
    names = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*")}
    assert {"config.json", "vocab.txt", "README.md"} <= names
    assert (tmp_path / "out/vocab.txt").read_text() == "of 1"
    assert not any(name.startswith("checkpoint-") for name in names)
