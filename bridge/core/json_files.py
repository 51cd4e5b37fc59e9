"""JSON read from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import CheckpointError


def read_json(file: Path, *, limit: int) -> dict[str, Any]:
    """The JSON object in `file`; `CheckpointError` when it is absent, larger than `limit` bytes, or not one."""
    try:
        with file.open("rb") as stream:
            text = stream.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error
    if len(text) > limit:
        raise CheckpointError(f"is larger than {limit} bytes, too large for what it should be", file=file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({error}); restore the file", file=file) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"holds a JSON {type(content).__name__}, not an object; restore the file", file=file)
    return content
