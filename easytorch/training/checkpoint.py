"""Checkpoints: a model folder as transformers writes it, and beside the weights what a resumed run needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from easytorch.bridge.atomic import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE = "training_state.pt"
_PREFIX = "checkpoint-"


def checkpoint_path(output: Path, step: int) -> Path:
    return output / f"{_PREFIX}{step}"


def save_checkpoint(
    final: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep: int,
) -> None:
    """Write `final` completely or not at all, then remove all but the newest `keep` beside it.

    Raises `CheckpointError` where it cannot be written; what was there before stays.
    """
    with new_folder(final, replace=True) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save({"step": step, **state}, temporary / STATE)
    for old in _checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def latest_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None when it has written none."""
    found = _checkpoints(Path(output))
    return found[-1] if found else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `state`, and the step."""
    path = checkpoint / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {STATE}: it can be loaded as a model, and not be resumed from")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _checkpoints(output: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in output.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))
