"""Checkpoints: a model folder as transformers writes it, with the state that resuming needs.

The sharded ones, which the processes write together, are in `sharded.py`; `load_state` reads the progress of both.
"""

from __future__ import annotations

import json
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
PROGRESS = "training_state.json"  # of a sharded checkpoint
OLDER = "move {} away to resume from the checkpoint before it"
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
    remove_old(final.parent, keep)


def remove_old(output: Path, keep: int) -> None:
    """Remove all checkpoints of a run but the newest `keep`."""
    for old in _checkpoints(output)[:-keep]:
        old.unlink() if old.is_symlink() else shutil.rmtree(old)


def latest_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None when it has written none."""
    found = _checkpoints(Path(output))
    return found[-1] if found else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The step and what was saved beside it; `CheckpointError` if it is damaged.

    "optimizer" is the `state_dict` of the optimizer; a sharded checkpoint has "optimizer_steps" instead, and its
    moments among the shards.
    """
    advice = OLDER.format(checkpoint)
    if (path := checkpoint / PROGRESS).is_file():
        state, optimizer = _read_json(path, advice), "optimizer_steps"
    elif (path := checkpoint / STATE).is_file():
        state, optimizer = _read_torch(path, advice), "optimizer"
    else:
        raise FileNotFoundError(f"{checkpoint} has no {STATE}: it can be loaded as a model but not resumed from")
    if not isinstance(state, dict) or not {"step", optimizer} <= state.keys():
        raise CheckpointError(f"holds no step and optimizer state; {advice}", file=path)
    if optimizer == "optimizer_steps" and not _are_steps(state[optimizer]):
        raise CheckpointError(f"holds no step and optimizer state; {advice}", file=path)
    if type(state["step"]) is not int or checkpoint.name != f"{_PREFIX}{state['step']}":
        raise CheckpointError(f"states the step {state['step']!r}; {advice}", file=path)
    settings = state.get("settings")
    if settings is not None and not (isinstance(settings, dict) and isinstance(settings.get("text"), dict)):
        raise CheckpointError(f"has settings that are not training settings; {advice}", file=path)
    return state


def _read_torch(path: Path, advice: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, OSError, EOFError, LookupError, pickle.UnpicklingError) as error:
        raise damaged(path, error, advice) from error


def _read_json(path: Path, advice: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise damaged(path, error, advice) from error


def damaged(path: Path, error: BaseException, advice: str) -> CheckpointError:
    """The error to raise for a checkpoint that cannot be read, by the first line of what reading it raised."""
    why = str(error).strip().partition("\n")[0]
    return CheckpointError(f"is damaged, or was not written by this trainer ({why}); {advice}", file=path)


def _are_steps(found: object) -> bool:
    return isinstance(found, dict) and all(type(one) in (int, float) and one >= 0 for one in found.values())


def _checkpoints(output: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in output.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))
