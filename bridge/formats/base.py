"""What a checkpoint format is: it recognises a path, opens it without loading data, and writes a stream of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from easytorch.bridge.dtypes import numpy_dtype

if TYPE_CHECKING:
    from easytorch.bridge.names.native_rules import Config

# numpy 1 has no more dimensions; a longer shape is never a weight.
MAX_RANK = 32


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file declares it; `dtype` is a name of `bridge.dtypes`, `file` is where its data stands.

    `packed` is what its format calls elements that are unpacked to `dtype` when they are read, and `packed_bytes` what
    they take in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str = field(default="", compare=False)
    packed: str = field(default="", compare=False)
    packed_bytes: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, which every reader has checked against the file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * numpy_dtype(self.dtype).itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return self.packed_bytes if self.packed else self.nbytes


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
        """What config.json would hold; None where it is of a model not known here."""


@runtime_checkable
class PartialReader(Reader, Protocol):
    """A reader of the model in a checkpoint that holds more; `left_out` are the names of the rest, joined by "/"."""

    left_out: tuple[str, ...]


@runtime_checkable
class TokenizedReader(Reader, Protocol):
    """A reader of a format that may hold the model's tokenizer too."""

    def write_tokenizer(self, folder: Path) -> str | None:
        """Writes it into `folder` as transformers reads it; why it could not, None where it could or there is none."""


class Source(Protocol):
    """What a writer takes its data from. `origin`: the checkpoint as it was opened, None for arrays in memory."""

    config: Config | None
    origin: Reader | None

    def read(self, name: str) -> np.ndarray:
        """The elements of one tensor, perhaps a strided view; may be called from several threads at once."""

    def wrote(self, info: TensorInfo) -> None:
        """To be called when a tensor has been written: progress is counted here."""


class Format(Protocol):
    """A checkpoint format: a container of named tensors, of whatever family."""

    name: str
    # The naming scheme its tensors always carry; None for a tree of arrays ("/" in the names), whose names tell it.
    scheme: str | None

    def detect(self, path: Path) -> Path | None:
        """What to open for `path`, a folder or a file: an index, a file, a folder, or None when it is not this."""

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """Opens what `detect` returned; `CheckpointError` for anything malformed.

        `writable` arrays may be changed by whoever reads them, without reaching the file.
        """


@runtime_checkable
class OwnNames(Protocol):
    """A format of trees that one program writes: names that could be anybody's are of its scheme, `usual_scheme`."""

    usual_scheme: str


class WritableFormat(Format, Protocol):
    """A format that can also be written, a file at a time: files can be resumed, and written side by side."""

    # How the name of a single file of this format ends; None for a format that is always a folder.
    suffix: str | None

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The files to write and what each holds, in stored order; `CheckpointError` for what it cannot hold."""

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """Writes one file of the layout into `folder`."""

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Writes what stands beside the files of `layout`: their index, for most."""

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        """What reading `array` back must give: itself, unless the format rounds."""


@runtime_checkable
class RoundingFormat(WritableFormat, Protocol):
    """A format that stores element types of its own, and not every tensor in the same."""

    def storing(self, dtype: str) -> WritableFormat:
        """The format for a `--dtype`; `ValueError` listing its own for one it cannot store."""
