"""The interface of a checkpoint format: it detects a path, opens it without loading data, and writes tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo

if TYPE_CHECKING:
    from easytorch.bridge.core.config import Config


# File name -> its tensors in the order they are stored.
Layout = Mapping[str, Sequence[TensorInfo]]


class Source(Protocol):
    """The tensors that a writer writes. `origin`: the opened checkpoint, None for arrays in memory."""

    config: Config | None
    origin: Reader | None

    def read(self, name: str) -> np.ndarray:
        """The elements of one tensor, possibly a strided view; thread-safe."""

    def wrote(self, info: TensorInfo) -> None:
        """Called when a tensor has been written, for progress."""


class Format(Protocol):
    """A checkpoint format: a container of named tensors of any family."""

    name: str

    @property
    def scheme(self) -> str | None:
        """The naming scheme its tensors always have; None for a tree of arrays ("/" in the names), whose names tell."""

    def detect(self, path: Path) -> Path | None:
        """The argument of `open` for a folder or a file: an index, a file or a folder; None for another format."""

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """Opens what `detect` returned; `CheckpointError` for anything malformed.

        `writable` arrays may be changed by the caller; the file stays as it is.
        """


@runtime_checkable
class OwnNames(Protocol):
    """A format that one program writes: ambiguous names are taken as that program's scheme, `usual_scheme`."""

    usual_scheme: str


class WritableFormat(Format, Protocol):
    """A format that can also be written, file by file: a conversion can resume, and write files in parallel."""

    # How the name of a single file of this format ends; None for a format that is always a folder.
    suffix: str | None

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The files to write and what each holds, in stored order; `CheckpointError` for what it cannot hold."""

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """Writes one file of the layout into `folder`."""

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Writes what belongs beside the files of `layout`: for most formats their index."""

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        """The expected result of reading `array` back: itself, unless the format rounds."""


@runtime_checkable
class RoundingFormat(WritableFormat, Protocol):
    """A format with its own element types, which may differ between tensors."""

    def storing(self, dtype: str) -> WritableFormat:
        """The format for a `--dtype`; `ValueError` listing its own for one it cannot store."""

    def stored_bytes(self, info: TensorInfo) -> int:
        """The bytes that the elements of a tensor take in the written file."""
