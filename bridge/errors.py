"""The one error that reading, converting and writing checkpoints raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike

from easytorch.bridge.core.printable import printable

# Names and shapes in a damaged file may be of any length.
_LONGEST = 4000
_LONGEST_NAME = 300


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: what is wrong, in which file and tensor, and what to do.

    `str(error)` is one line; `file` and `tensor` say where, None where it is not a single file or tensor.
    """

    def __init__(self, message: str, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> None:
        self.file = None if file is None else str(file)
        self.tensor = tensor
        place = [part for part in (self.file, None if tensor is None else f"tensor {tensor!r}") if part]
        text = printable(": ".join([*place, message]).replace("\n", " "))
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")


def nearest(name: str, known: Iterable[str]) -> str:
    """` (nearest known name: 'x')` for the name in `known` most similar to `name`, or an empty string."""
    if len(name) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name, [one for one in known if len(one) <= _LONGEST_NAME], n=1)
    return f" (nearest known name: {close[0]!r})" if close else ""
