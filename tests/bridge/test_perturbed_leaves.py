"""A sample of scripts/perturb_leaves.py: leaves that differ come back, missing ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import architecture_of
from scripts.perturb_bridge import Case, model_of, write
from scripts.perturb_leaves import losses

SEED = 0


@pytest.mark.parametrize(
    ("family", "target", "each"),
    [
        ("resnet", "flax", 3),
        ("llama", "maxtext", 1),
        ("mt5", "t5x", 1),
        ("vit", "big_vision", 1),
        ("gemma", "gemma", 1),
    ],
)
def test_no_leaf_is_lost(family: str, target: str, each: int, tmp_path: Path) -> None:
    assert not list(losses(model_of(family, SEED), target, each, tmp_path)), f"seed {SEED}"


@pytest.mark.parametrize("family", ["resnet", "detr", "deepseek_v3"])
def test_buffers_that_nothing_makes_anew_are_needed_like_weights(family: str, tmp_path: Path) -> None:
    """Statistics of norms, the weights of DETR's frozen norms, the biases of DeepSeek's routers."""
    model = model_of(family, SEED)
    state = model.state()
    names = architecture_of(Config(Path("config.json"), model.content), 10_000).names
    parameters = {name for name, _ in names.model.named_parameters(remove_duplicate=False)}
    buffers = [name for name in model.shapes if names.places[name].name not in parameters]
    ends = {name.rpartition(".")[2]: name for name in buffers}
    assert ends
    for end, name in ends.items():
        others = {one: array for one, array in state.items() if one != name}
        for message, changed in (("is missing", others), ("has shape", {**others, name: state[name][:-1]})):
            write(tmp_path / f"{end} {message}", model, Case(message, changed))
            with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
                convert(tmp_path / f"{end} {message}", tmp_path / "new", to="flax")
    # A count of batches is for training alone, and old checkpoints lack it.
    counted = {name: array for name, array in state.items() if not name.endswith("num_batches_tracked")}
    write(tmp_path / "old", model, Case("old", counted))
    convert(tmp_path / "old", tmp_path / "flax", to="flax")
