"""What a checkpoint format is: it recognises a path, opens it without loading data, and writes a stream of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import numpy as np

from easytorch.bridge.dtypes import numpy_dtype

Naming = Literal["torch", "flax"]
# numpy 1 has no more dimensions; a longer shape is never a weight.
MAX_RANK = 32


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file declares it; `dtype` is a name of `bridge.dtypes`, `file` is where its data stands."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, which every reader has checked against the file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * numpy_dtype(self.dtype).itemsize


# File name -> its tensors in the order they are stored.
Layout = Mapping[str, Sequence[TensorInfo]]


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
        """The files that make up the checkpoint, index included."""

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, a view of the mapped file where the format allows."""

    def close(self) -> None: ...

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Format(Protocol):
    """A checkpoint format. `naming` says whose names its tensors carry."""

    name: str
    naming: Naming

    def detect(self, path: Path) -> Path | None:
        """The file to open for `path`, a folder or a file: an index, a single file, or None when there is none."""

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """Opens what `detect` returned; `CheckpointError` for anything malformed.

        `writable` arrays may be changed by whoever reads them, without reaching the file.
        """


class WritableFormat(Format, Protocol):
    """A format that can also be written."""

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The files to write and what each holds, in stored order; `CheckpointError` for what it cannot hold."""

    def write(self, folder: Path, layout: Layout, data: Iterator[np.ndarray]) -> None:
        """Writes `layout` into `folder`; `data` gives the elements of every tensor in the layout's order."""
