"""Where the parameters stand in what training programs save: by the names of its arrays alone."""

from __future__ import annotations

import numpy as np
import pytest

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.unwrap import unwrapped
from easytorch.bridge.rules.table import compile_rules
from easytorch.bridge.state import tree_to_state_dict

PARAMETERS = ("embed/kernel", "head/bias", "head/kernel")
STATISTICS = ("embed/mean",)
COLLECTIONS = {
    **{f"params/{name}": name for name in PARAMETERS},
    **{f"batch_stats/{name}": name for name in STATISTICS},
}
RULES = (
    ("embed.weight", "embed/kernel", "identity"),
    ("head.weight", "head/kernel", "linear"),
    ("head.bias", "head/bias", "identity"),
)


def at(*trees: str) -> list[str]:
    """The names in a checkpoint of those trees; `.step` is an array at the root."""
    names = []
    for tree in trees:
        if tree.startswith("."):
            names.append(tree[1:])
        else:
            names += [f"{tree}/{name}" for name in (STATISTICS if tree.endswith("batch_stats") else PARAMETERS)]
    return names


@pytest.mark.parametrize(
    ("trees", "read"),
    [
        (["variables/params", "variables/batch_stats"], "variables/params"),
        (["variables/params", "variables/batch_stats", ".step"], "variables/params"),
        (["model_variables/params", "model_variables/batch_stats", "opt_state/0/mu"], "model_variables/params"),
        (["target", "batch_stats"], "target"),
        (["target/params", "batch_stats", ".step"], "target/params"),
        (["optimizer/target", "optimizer/state/param_states", "batch_stats"], "optimizer/target"),
        (["optimizer/target/params", "model_state/batch_stats", ".global_step"], "optimizer/target/params"),
        (["optimizer/target", "flax_mutables/batch_stats", ".rng"], "optimizer/target"),
        (["target", "ema_params", "batch_stats", ".step"], "target"),
        (["params", "state/batch_stats"], "params"),
        (["model/params", "model/batch_stats", "ema_model/params", "ema_model/batch_stats"], "model/params"),
        (["params", "batch_stats", "ema/params", "ema/batch_stats"], "params"),
    ],
)
def test_statistics_are_read_with_the_parameters(trees, read):
    found = unwrapped(at(*trees))
    assert found.read == read
    assert {path: name.removeprefix(f"{read}/") for path, name in found.names.items() if path.startswith("params")} == {
        path: name for path, name in COLLECTIONS.items() if path.startswith("params")
    }
    assert {path for path in found.names if path.startswith("batch_stats/")} == {"batch_stats/embed/mean"}
    assert not any(name.startswith("ema") for name in found.names.values())


@pytest.mark.parametrize(
    ("trees", "read"),
    [
        (["model", "ema_model"], "model"),
        (["model", "ema_model", "opt_state/mu", ".step"], "model"),
        (["state/model", "state/opt_state/0", "state/ema_model"], "state/model"),
        (["ckpt/state/params", "ckpt/state/opt_state/0/mu"], "ckpt/state/params"),
        (["state_dict/params"], "state_dict/params"),
        (["model/variables/params", "opt_state/mu"], "model/variables/params"),
        # As they are: nothing says which is the model, or that there is a wrapper at all.
        (["actor/params", "critic/params"], ""),
        (["weights", "adam/mu/params"], ""),
        (["module", "optimizer"], ""),
        (["model/layers", "head"], ""),
    ],
)
def test_one_tree_of_parameters_is_read(trees, read):
    found = unwrapped(at(*trees))
    assert found.read == read
    names = at(*trees) if read == "" else [f"{read}/{name}" for name in PARAMETERS]
    assert list(found.names.values()) == names


def test_trees_nobody_can_choose_between_are_named():
    leaf = {"embed": {"kernel": np.ones(2)}, "head": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}}
    for tree, listed in (
        ({"actor": {"params": leaf}, "critic": {"params": leaf}}, "actor/params, critic/params"),
        ({"module": leaf, "optimizer": leaf}, "module, optimizer"),
        ({"params": {"generator": leaf, "judge": leaf}}, "generator, judge"),
    ):
        with pytest.raises(CheckpointError, match=rf"trees of weights, {listed}; choose one by `params_key`"):
            tree_to_state_dict(tree, RULES)
    with pytest.raises(CheckpointError, match="no rule of this family names it"):
        tree_to_state_dict({**leaf, "tail": {"bias": np.ones(2)}}, RULES)


def test_the_tree_that_an_error_names_can_be_chosen():
    for trees in (["actor/params", "critic/params"], ["module", "optimizer"], ["params/g", "params/d"], ["x/g", "x/d"]):
        for tree in trees:
            assert list(unwrapped(at(*trees), tree).names) == list(PARAMETERS)
    for wrapper in ("params", "x"):
        assert list(unwrapped(at(f"{wrapper}/g", f"{wrapper}/d"), "g").names) == list(PARAMETERS)
    assert compile_rules(RULES).unknown_flax("b/head/bias", at("a", "b")).count("a, b") == 1


def test_two_leaves_of_one_parameter_are_named():
    """A variable that stands twice, under both of its names: neither is passed over."""
    with pytest.raises(CheckpointError, match="are one parameter; remove one"):
        unwrapped(["a/kernel/value", "a/kernel/raw_value", "b/kernel/value"])
