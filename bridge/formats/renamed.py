"""Open checkpoints whose tensors go by other names than they are stored under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from easytorch.bridge.closing import Closing
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Reader, TensorInfo
from easytorch.bridge.formats.in_parts import InParts, read_in_parts


class RenamedReader(Closing):
    """The tensors of `reader` that `names` lists, name here -> stored name. Closing it closes `reader`."""

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names
        self.tensors: Mapping[str, TensorInfo] = {
            path: replace(reader.tensors[name], name=path) for path, name in names.items()
        }
        self.metadata = reader.metadata
        self.files = reader.files

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, as `reader` gives it."""
        return self._reader.read(self._names[name])

    def read_in_parts(self, name: str) -> InParts:
        """The same, in parts where `reader` can."""
        return read_in_parts(self._reader, self._names[name])

    def close(self) -> None:
        """Closes the reader behind it."""
        self._reader.close()


def by_paths(reader: Reader) -> RenamedReader:
    """`reader`, whose names are paths joined by dots, by those paths; closed where two names are one path."""
    names: dict[str, str] = {}
    for name in reader.tensors:
        path = name.replace(".", "/")
        if names.setdefault(path, name) != name:
            reader.close()
            raise CheckpointError(f"and {names[path]!r} are one path", file=reader.files[0], tensor=name)
    return RenamedReader(reader, names)
