"""Open checkpoints: the interface that every format's reader has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from easytorch.bridge.core.tensor_info import TensorInfo


class Reader(Protocol):
    """An open checkpoint. Only `read` touches tensor data; `close` (or leaving the `with` block) releases the files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the file's order."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text the format keeps beside the tensors."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, or whole folders, that make up the checkpoint, the one that was opened first, index included."""

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, a view of the mapped file where the format allows."""

    def close(self) -> None: ...

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class DescribedReader(Reader, Protocol):
    """A reader of a format that states the model's config itself."""

    def config(self) -> dict[str, Any] | None:
        """The content of config.json; None for a model that is not known here."""


@runtime_checkable
class PartialReader(Reader, Protocol):
    """A reader of the model in a checkpoint that holds more; `left_out` are the names of the rest, joined by "/"."""

    left_out: tuple[str, ...]


@runtime_checkable
class TokenizedReader(Reader, Protocol):
    """A reader of a format that may hold the model's tokenizer too."""

    def write_tokenizer(self, folder: Path) -> str | None:
        """Writes the tokenizer into `folder` for transformers; returns why it could not, or None (also without one)."""
