"""What a torch checkpoint holds and Flax has no place for, kept in a small file in the Flax folder.

`torch_buffers.safetensors` holds the tensors; its metadata lists the repeats of tied weights that the torch file had,
so that the way back gives the same file again. Flax itself never reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.formats.torch_safetensors import SafetensorsFile, storage_order, write_file

FILE_NAME = "torch_buffers.safetensors"


def write_side_file(folder: Path, arrays: Mapping[str, np.ndarray], tied: Iterable[str]) -> None:
    """Writes the file, or nothing when there is nothing to keep."""
    names = sorted(tied)
    if not arrays and not names:
        return
    infos = storage_order([TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()])
    data: Iterator[np.ndarray] = (arrays[info.name] for info in infos)
    write_file(folder / FILE_NAME, infos, data, {"format": "pt", "tied": json.dumps(names)})


def read_side_file(folder: Path) -> tuple[SafetensorsFile | None, list[str]]:
    """The open file and the tied names in it, or None and no names when there is none."""
    file = folder / FILE_NAME
    if not file.is_file():
        return None, []
    reader = SafetensorsFile(file)
    try:
        tied = json.loads(reader.metadata.get("tied", "[]"))
    except (ValueError, RecursionError):
        tied = None
    if not isinstance(tied, list) or not all(isinstance(name, str) for name in tied):
        reader.close()
        raise CheckpointError("its metadata `tied` is not a list of names; remove the file", file=file)
    return reader, tied
