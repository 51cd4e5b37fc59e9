"""`metrics.jsonl`: one JSON object per line, for a training step or an evaluation.

JSON has no NaN and no infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from easytorch.bridge.storage.atomic import new_file
from easytorch.training.disk import named_os_errors


class MetricsFile:
    """Writes `metrics.jsonl`. A run resumed after `step` keeps the lines up to it; it will write the others again."""

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step and path.exists() else []
        self._path = path
        with new_file(path, path.name, replace=True) as folder:  # what was kept is never less than it was
            (folder / path.name).write_text("".join(map(_line, kept)), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        with named_os_errors(self._path):
            self._file.write(_line(values))
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # `write` has flushed, or said why it could not
            self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; the last is left out when a killed run wrote only half of it."""
    lines = Path(path).read_bytes().splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise ValueError(f"{path}: line {number} is not the metrics of a step; correct it, or remove the file")
        found.append(values)
    return found


def series(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has a finite `name`."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _line(values: dict[str, Any]) -> str:
    finite = {name: None if _not_finite(value) else value for name, value in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
