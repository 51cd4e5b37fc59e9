"""safetensors with Flax names: `model.safetensors` whose metadata says `format: flax`; a path's parts joined by ".".

Source: `FlaxPreTrainedModel.save_pretrained(safe_serialization=True)` of transformers 4.57, which writes shards as
msgpack only. Shards here are its file in the layout of torch's: `model.safetensors.index.json` and the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.renamed_reader import by_paths
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.safetensors_files.torch_safetensors import (
    SafetensorsFile,
    states_flax,
    storage_order,
    write_file,
)
from easytorch.bridge.formats.sharding import find, open_files, shard_names, split, write_index


class _Dotted:
    """A source whose tensors are read under the dotted names of the file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.config, self.origin = source.config, source.origin

    def read(self, name: str) -> np.ndarray:
        return self._source.read(name.replace(".", "/"))

    def wrote(self, info: TensorInfo) -> None:
        self._source.wrote(replace(info, name=info.name.replace(".", "/")))


class FlaxSafetensors:
    """Flax's safetensors: torch's container, with the names of a tree."""

    name = "Flax safetensors"
    scheme: str | None = None
    suffix = ".safetensors"
    file_name = "model.safetensors"

    def detect(self, path: Path) -> Path | None:
        """As torch's, of those that state Flax names."""
        found = find(path, self.file_name, suffixes=(".safetensors", ".safetensors.index.json"))
        return found if found is not None and states_flax(found) else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return by_paths(open_files(file, partial(SafetensorsFile, writable=writable)))

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """Shards by path, so that each holds neighbouring layers."""
        for info in tensors:
            if "." in info.name:
                message = "has a dot in its path, which would read as another path here; save it as msgpack"
                raise CheckpointError(message, tensor=info.name)
        groups = split(sorted(tensors, key=lambda info: info.name), max_shard_size)
        files = shard_names(self.file_name, len(groups))
        return {file: storage_order(group) for file, group in zip(files, groups, strict=True)}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """One file of the layout."""
        write_file(folder / file, _dotted(tensors), _Dotted(source), {"format": "flax"})

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """The index, when there are several files."""
        if len(layout) > 1:
            dotted = {file: _dotted(tensors) for file, tensors in layout.items()}
            write_index(folder / f"{self.file_name}.index.json", dotted)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array


def _dotted(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    return [replace(info, name=info.name.replace("/", ".")) for info in tensors]
