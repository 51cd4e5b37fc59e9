"""EasyDeL's safetensors (`easydel-model.parameters`): a tree whose keys are joined by dots; read only.

Source: FJFormer `checkpoint/streamer.py` (`save_checkpoint_safe`) and eformer `serialization/base_manager.py`, what
EasyDeL wrote from 2024 on, in one file or in shards, until it took tensorstore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Reader, TensorInfo
from easytorch.bridge.formats.sharding import open_files
from easytorch.bridge.formats.torch_safetensors import SafetensorsFile

_FILE = "easydel-model.parameters"
_INDEX = f"{_FILE}.safetensors.index.json"


class DottedTree:
    """The tensors of `reader` by path, "/" for every dot."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._names = {name.replace(".", "/"): name for name in reader.tensors}
        if len(self._names) < len(reader.tensors):
            reader.close()
            raise CheckpointError("has names that differ only in dots and slashes", file=reader.files[0])
        self.tensors: Mapping[str, TensorInfo] = {
            path: replace(reader.tensors[name], name=path) for path, name in self._names.items()
        }
        self.metadata = reader.metadata
        self.files = reader.files

    def read(self, name: str) -> np.ndarray:
        """A view of the mapped file."""
        return self._reader.read(self._names[name])

    def close(self) -> None:
        """Closes the reader behind it."""
        self._reader.close()

    def __enter__(self) -> DottedTree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EasydelSafetensors:
    """The format of EasyDeL's models from 2024 to 2025."""

    name = "EasyDeL safetensors"
    scheme = None
    usual_scheme = "easydel"

    def detect(self, path: Path) -> Path | None:
        """The index or the file of a folder; either given as a file."""
        if path.is_file():
            return path if path.name in (_FILE, _INDEX) else None
        return next((file for name in (_INDEX, _FILE) if (file := path / name).is_file()), None)

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return DottedTree(open_files(file, partial(SafetensorsFile, writable=writable)))
