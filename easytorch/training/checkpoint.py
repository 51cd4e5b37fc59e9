"""Checkpoints: a model folder as transformers writes it, with the state that resuming needs."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.atomic import new_folder
from easytorch.training.disk import named_os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE = "training_state.pt"
_PREFIX = "checkpoint-"
_NAME = re.compile(_PREFIX + "[0-9]+")


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
    """Write `final` atomically, then remove all but the newest `keep` beside it.

    Raises `CheckpointError` where it cannot be written; what was there before stays.
    """
    with new_folder(final, replace=True) as temporary, named_os_errors(final):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # An open file: given a path, torch's error does not say why it could not be written.
        with (temporary / STATE).open("wb") as file:
            torch.save({"step": step, **state}, file)
    for old in _checkpoints(final.parent)[:-keep]:
        old.unlink() if old.is_symlink() else shutil.rmtree(old)


def latest_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None when it has written none."""
    found = _checkpoints(Path(output))
    return found[-1] if found else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` given to `save_checkpoint`, and the step; `CheckpointError` if it is damaged."""
    path = checkpoint / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {STATE}: it can be loaded as a model but not resumed from")
    advice = f"move {checkpoint} away to resume from the checkpoint before it"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, OSError, EOFError, LookupError, pickle.UnpicklingError) as error:
        why = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"is damaged, or was not written by this trainer ({why}); {advice}", file=path) from error
    if not isinstance(state, dict) or not {"step", "optimizer"} <= state.keys():
        raise CheckpointError(f"holds no step and optimizer state; {advice}", file=path)
    if type(state["step"]) is not int or checkpoint.name != f"{_PREFIX}{state['step']}":
        raise CheckpointError(f"states the step {state['step']!r}; {advice}", file=path)
    settings = state.get("settings")
    if settings is not None and not (isinstance(settings, dict) and isinstance(settings.get("text"), dict)):
        raise CheckpointError(f"has settings that are not training settings; {advice}", file=path)
    return state


def _checkpoints(output: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in output.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))
