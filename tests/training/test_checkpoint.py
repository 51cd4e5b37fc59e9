from __future__ import annotations

import pytest
import torch

from easytorch.bridge.errors import CheckpointError
from easytorch.training.checkpoint import checkpoint_path, latest_checkpoint, load_state, save_checkpoint


class Saves:
    """Stands for a model or a tokenizer: something with `save_pretrained`."""

    def __init__(self, name, error=None):
        self.name, self.error = name, error

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / self.name).write_text("content")
        if self.error is not None:
            raise self.error


def save(output, step, *, keep=2, model=None):
    state = {"optimizer": {"moment": torch.full((2,), float(step))}}
    return save_checkpoint(
        checkpoint_path(output, step), step, model or Saves("model"), Saves("tokenizer"), state, keep
    )


def test_the_newest_are_kept_in_numeric_order(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step in (8, 9, 10):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "checkpoint-10"
    state = load_state(newest)
    assert state["step"] == 10 and state["optimizer"]["moment"].tolist() == [10.0, 10.0]


def test_a_failure_leaves_the_former_checkpoint_and_nothing_else(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match="checkpoint-5: cannot be written: disk full"):
        save(tmp_path, 5, model=Saves("model", OSError("disk full")))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert load_state(tmp_path / "checkpoint-5")["step"] == 5


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "left-over").touch()
    save(tmp_path, 5)
    assert not (tmp_path / "checkpoint-5" / "left-over").exists()


def test_a_model_without_training_state_cannot_be_resumed(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(FileNotFoundError, match="loaded as a model but not resumed from"):
        load_state(tmp_path / "checkpoint-3")
