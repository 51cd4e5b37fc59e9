"""The steps of a run: folders called `100`, `step_100` or `checkpoint_100`, each with a checkpoint of its own."""

from __future__ import annotations

import re
from pathlib import Path

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry

_STEP = re.compile(r"(?:^|[_-])(\d{1,18})$")


def steps_in(path: Path) -> dict[int, Path]:
    """The steps whose folders stand in `path`, in order."""
    if not path.is_dir():
        return {}
    found = {int(match[1]): one for one in path.iterdir() if one.is_dir() and (match := _STEP.search(one.name))}
    return dict(sorted(found.items()))


def chosen(path: Path, step: int | None) -> Path:
    """What to open of `path`: a step's folder, the last one's where it holds nothing but steps, or `path` itself."""
    if step is not None:
        return at_step(path, step)
    found = steps_in(path)
    if not found or _has_weights(path):
        return path
    return next((folder for folder in reversed(found.values()) if _has_weights(folder)), path)


def _has_weights(path: Path) -> bool:
    return any(form.detect(path) for form in registry.formats())


def at_step(path: Path, step: int) -> Path:
    """The folder of one step of the run at `path`; `CheckpointError` listing those there are otherwise."""
    found = steps_in(path)
    readable = [one for one, folder in found.items() if _has_weights(folder)]
    if step not in readable:
        listed = f"the steps there are {', '.join(map(str, readable))}" if readable else "there are no steps in it"
        raise CheckpointError(f"has no step {step}; {listed}", file=path)
    return found[step]


def step_folder(path: Path, file: Path) -> Path | None:
    """The folder of the step that `file`, which was opened for `path`, belongs to; None where `path` is no run."""
    return next((one for one in steps_in(path).values() if file == one or one in file.parents), None)


def step_read(path: Path, file: Path) -> str | None:
    """What to say of the step that `file`, which was opened for `path`, belongs to; None where it is no run's."""
    found = steps_in(path)
    read = next((one for one, folder in found.items() if folder == step_folder(path, file)), None)
    if read is not None:
        return f"step {read} is read, of {', '.join(map(str, found))}"
    own = _STEP.search(path.name) if path.is_dir() else None
    return None if own is None else f"step {own[1]} is read"
