"""Tensors of a torch checkpoint that a tree cannot hold, kept in a small file in the tree's folder.

`torch_buffers.safetensors` holds the tensors; its metadata lists the repeats of tied weights that the torch file had,
so that converting back gives the same file again. Programs that read the tree ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.safetensors_files.torch_safetensors import SafetensorsFile, storage_order, write_file

FILE_NAME = "torch_buffers.safetensors"


class TorchBuffers(SafetensorsFile):
    """The open file. `tied` are the torch names of the repeats."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            tied = json.loads(self.metadata.get("tied", "[]"))
        except (ValueError, RecursionError):
            tied = None
        if not isinstance(tied, list) or not all(isinstance(name, str) for name in tied):
            self.close()
            raise CheckpointError("its metadata `tied` is not a list of names; remove the file", file=path)
        self.tied: list[str] = tied

    @classmethod
    def beside(cls, path: Path) -> TorchBuffers | None:
        """That of the checkpoint at `path`, a folder or a file in it, or None."""
        file = (path if path.is_dir() else path.parent) / FILE_NAME
        return cls(file) if file.is_file() else None


def write_torch_buffers(folder: Path, arrays: Mapping[str, np.ndarray], tied: Iterable[str]) -> None:
    """Writes the file, or nothing when there is nothing to keep."""
    names = sorted(tied)
    if not arrays and not names:
        return
    infos = storage_order([TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()])
    write_file(folder / FILE_NAME, infos, ArraySource(arrays), {"format": "pt", "tied": json.dumps(names)})
