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


def chosen(path: Path, step: int | None, steps: dict[int, Path]) -> tuple[Path, registry.Found | None]:
    """The folder to open for `path`: a step's folder (the last one's if it holds only steps), or `path` itself.

    Second, the formats found there, None where they were not looked for. steps: `steps_in(path)`.
    """
    if step is not None:
        return at_step(path, step, steps)
    if not steps:
        return path, None
    if found := registry.classify(path):
        return path, found
    read = ((folder, registry.classify(folder)) for folder in reversed(steps.values()))
    return next(((folder, held) for folder, held in read if held), (path, found))


def at_step(path: Path, step: int, steps: dict[int, Path]) -> tuple[Path, registry.Found]:
    """The folder of one step of the run at `path`, and what it holds; `CheckpointError` listing the steps otherwise."""
    found = registry.classify(steps[step]) if step in steps else {}
    if not found:
        readable = [one for one, folder in steps.items() if registry.classify(folder)]
        listed = f"the steps there are {', '.join(map(str, readable))}" if readable else "there are no steps in it"
        raise CheckpointError(f"has no step {step}; {listed}", file=path)
    return steps[step], found


def step_folder(path: Path, file: Path, steps: dict[int, Path] | None = None) -> Path | None:
    """The folder of the step that `file`, which was opened for `path`, belongs to; None where `path` is no run.

    steps: `steps_in(path)`, where it is known.
    """
    found = steps_in(path) if steps is None else steps
    return next((one for one in found.values() if _holds(one, file)), None)


def step_read(path: Path, file: Path, steps: dict[int, Path]) -> str | None:
    """A note on which step `file`, opened for `path`, belongs to; None where `path` is not a run."""
    read = next((one for one, folder in steps.items() if _holds(folder, file)), None)
    if read is not None:
        return f"step {read} is read, of {', '.join(map(str, steps))}"
    own = _STEP.search(path.name) if path.is_dir() else None
    return None if own is None else f"step {own[1]} is read"


def _holds(folder: Path, file: Path) -> bool:
    return file == folder or folder in file.parents
