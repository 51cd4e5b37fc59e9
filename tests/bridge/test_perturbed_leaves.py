"""A sample of scripts/perturb_leaves.py: leaves that differ come back, missing ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
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


@pytest.mark.parametrize("family", ["resnet", "detr"])
@pytest.mark.parametrize("end", ["running_mean", "running_var"])
def test_statistics_are_no_less_than_weights(family: str, end: str, tmp_path: Path) -> None:
    """They are buffers, which nothing makes anew, as the weights of the frozen norms of DETR's backbone are."""
    model = model_of(family, SEED)
    state = model.state()
    norm = next(name for name in reversed(state) if name.endswith(end)).removesuffix(end)
    for number, name in enumerate(f"{norm}{one}" for one in (end, "weight", "bias")):
        for harm, message in (("missing", "is missing"), ("shape", "has shape")):
            changed = {one: array for one, array in state.items() if one != name}
            if harm == "shape":
                changed[name] = state[name][:-1]
            write(tmp_path / f"{harm}{number}", model, Case(harm, changed))
            with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
                convert(tmp_path / f"{harm}{number}", tmp_path / "new", to="flax")
    # A count of batches is for training alone, and old checkpoints lack it.
    counted = {name: array for name, array in state.items() if not name.endswith("num_batches_tracked")}
    write(tmp_path / "old", model, Case("old", counted))
    convert(tmp_path / "old", tmp_path / "flax", to="flax")
