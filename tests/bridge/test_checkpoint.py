"""Opening a checkpoint asks the formats about its folder once, and takes the wrappers off its tree once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from easytorch.bridge import checkpoint as checkpoint_module
from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.convert import convert
from easytorch.bridge.formats import registry, steps
from easytorch.bridge.names import unwrap


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counted = {"classify": 0, "unwrapped": 0, "steps_in": 0}

    def counting(name: str, function):
        def call(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(registry, "classify", counting("classify", registry.classify))
    monkeypatch.setattr(unwrap, "unwrapped", counting("unwrapped", unwrap.unwrapped))
    monkeypatch.setattr(checkpoint_module, "steps_in", counting("steps_in", steps.steps_in))
    monkeypatch.setattr(steps, "steps_in", counting("steps_in", steps.steps_in))
    return counted


@pytest.fixture
def tree(tiny_torch: Path, tmp_path: Path) -> Path:
    convert(tiny_torch, tmp_path / "tree", to="flax")
    return tmp_path / "tree"


def test_a_folder(tree: Path, calls: dict[str, int]) -> None:
    with open_checkpoint(tree) as checkpoint:
        checkpoint.in_scheme("torch")
    assert calls == {"classify": 1, "unwrapped": 1, "steps_in": 1}


def test_a_step_of_a_run(tree: Path, tmp_path: Path, calls: dict[str, int]) -> None:
    for step in (10, 20, 30):
        shutil.copytree(tree, tmp_path / "run" / str(step))
    with open_checkpoint(tmp_path / "run", step=20) as checkpoint:
        checkpoint.in_scheme("torch")
    assert calls == {"classify": 1, "unwrapped": 1, "steps_in": 1}


def test_a_conversion(tree: Path, tmp_path: Path, calls: dict[str, int]) -> None:
    convert(tree, tmp_path / "out", to="torch")
    assert calls["classify"] == calls["unwrapped"] == 1
