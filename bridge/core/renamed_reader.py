"""Open checkpoints whose tensors have other names than in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from easytorch.bridge.core.boxes import Box, read_box
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.reader import PartialReader, Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError, nearest


class RenamedReader(ContextManager):
    """The tensors of `reader` under other names: `names` maps a name here to the name there.

    Closing it closes `reader`.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self.names = names
        self.tensors: Mapping[str, TensorInfo] = {
            path: replace(reader.tensors[name], name=path) for path, name in names.items()
        }
        self.metadata = reader.metadata
        self.files = reader.files

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, as `reader` gives it."""
        return self._reader.read(self.names[name])

    def read_in_parts(self, name: str) -> InParts:
        """`read`, with the tensor in parts where the underlying reader gives parts."""
        return read_in_parts(self._reader, self.names[name])

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """A box of one tensor, without the rest where the underlying reader gives it so."""
        return read_box(self._reader, self.names[name], box)

    def close(self) -> None:
        """Closes the reader behind it."""
        self._reader.close()


class _Without(RenamedReader):
    """The result of `without`. `left_out` are the names that the underlying reader had left out already."""

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        super().__init__(reader, names)
        self.left_out: tuple[str, ...] = reader.left_out if isinstance(reader, PartialReader) else ()


def without(reader: Reader, patterns: Iterable[str]) -> Reader:
    """`reader` without the tensors that match `patterns` (`*` is a wildcard); a pattern without a match is an error."""
    if isinstance(patterns, str):
        raise TypeError(f"drop is the string {patterns!r}; give a list of names")
    dropped = matching(reader, patterns)
    return _Without(reader, {name: name for name in reader.tensors if name not in dropped})


def matching(reader: Reader, patterns: Iterable[str]) -> set[str]:
    """The tensors of `reader` that `patterns` name, as `without` reads them."""
    matched: set[str] = set()
    for pattern in patterns:
        # Names may hold brackets, as those of lists do.
        own = pattern.replace("[", "[[]").replace("?", "[?]")
        found = {name for name in reader.tensors if fnmatchcase(name, own)}
        if not found:
            message = f"no tensor to drop is called so{nearest(pattern, reader.tensors)}"
            raise CheckpointError(message, file=reader.files[0], tensor=pattern)
        matched |= found
    return matched


def by_paths(reader: Reader) -> RenamedReader:
    """`reader` with its dotted names as paths; it is closed, with an error, where two names are the same path."""
    names: dict[str, str] = {}
    for name in reader.tensors:
        path = name.replace(".", "/")
        if names.setdefault(path, name) != name:
            reader.close()
            raise CheckpointError(f"and {names[path]!r} are the same path", file=reader.files[0], tensor=name)
    return RenamedReader(reader, names)
