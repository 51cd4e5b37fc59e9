"""Checkpoints: a model folder as transformers writes it, and beside the weights what a resumed run needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE = "training_state.pt"
_PREFIX = "checkpoint-"


def save_checkpoint(
    output: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `output/checkpoint-<step>` whole or not at all, then remove all but the newest `keep`.

    The folder is filled under a temporary name, synced to disk, and renamed.
    """
    final = output / f"{_PREFIX}{step}"
    temporary = output / f".{final.name}.{os.getpid()}"
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save({"step": step, **state}, temporary / STATE)
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _checkpoints(output)[:-keep]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None when it has written none."""
    found = _checkpoints(Path(output))
    return found[-1] if found else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `state`, and the step."""
    path = checkpoint / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {STATE}: it can be loaded as a model, and not be resumed from")
    return torch.load(path, map_location="cpu", weights_only=True)


def _checkpoints(output: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in output.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
