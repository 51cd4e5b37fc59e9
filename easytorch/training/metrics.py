"""`metrics.jsonl`: one JSON object a line, for a training step or an evaluation.

JSON has no NaN and no infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsFile:
    """Writes `metrics.jsonl`. A run resumed after `step` keeps the lines up to it; it will write the others again."""

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for line in kept:
            self.write(**line)

    def write(self, **values: Any) -> None:
        finite = {name: None if _not_finite(value) else value for name, value in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; the last is left out when a killed run wrote only half of it."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def series(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has a finite `name`."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
