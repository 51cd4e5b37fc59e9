"""Orbax checkpoints: trees of zarr arrays, in one store (OCDBT) or a folder per array; names are paths with "/".

Written by orbax's PyTree and Standard handlers. A leaf is named by the keys that lead to it: dictionary keys, list
positions or attributes. Only metadata is read until a tensor is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.boxes import Box
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.array_chunks import in_one_window, windows
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.orbax_trees import write as orbax_write
from easytorch.bridge.formats.orbax_trees.index import AGGREGATE, MANIFEST, find_tree, own_paths, read_index
from easytorch.bridge.formats.tensorstore_arrays import (
    array_spec,
    load_tensorstore,
    new_context,
    store_spec,
    tensorstore_errors,
)
from easytorch.bridge.formats.zarr_metadata import DESCRIPTIONS, ZarrArray, parse

# No compressor of tensorstore does better than zstd on constant runs: four bytes for 128 KiB.
_MOST_PACKED = 1 << 15


class OrbaxReader(ContextManager):
    """One open tree: its arrays are described, and read one at a time."""

    def __init__(self, folder: Path) -> None:
        ts = load_tensorstore()
        self._folder = folder
        self.files = tuple(own_paths(folder, ()))
        self._context = new_context()
        self._store = store_spec(folder, ocdbt=(folder / MANIFEST).is_file())
        self._inline: MappedFile | None = None
        index = read_index(folder)
        self._located = index.inline
        self.metadata: Mapping[str, str] = index.strings
        with tensorstore_errors(self.files[0]):
            store = ts.KvStore.open(self._store, context=self._context).result()
            keys = [key.decode("utf-8", "replace") for key in store.list().result()]
        self._keys = index.stored or ({} if index.inline else _keys_alone(keys))
        self._arrays = self._describe(store, set(keys))
        self.files = tuple(own_paths(folder, self._arrays))
        self._check(Counter(_owner(key, self._arrays) for key in keys), index.all_stored)
        if self._located:
            self._inline = MappedFile(folder / AGGREGATE)
        self.tensors: Mapping[str, TensorInfo] = {
            **{path: self._info(path, self._arrays[key]) for path, key in self._keys.items()},
            **{path: self._info(path, located) for path, located in self._located.items()},
        }

    def _info(self, path: str, array: Any) -> TensorInfo:
        return TensorInfo(path, array.shape, array.dtype, str(self._folder))

    def _fail(self, message: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(f"{message}; copy the checkpoint again", file=self.files[0], tensor=tensor)

    def _describe(self, store: Any, keys: set[str]) -> dict[str, ZarrArray]:
        """Every array by its key in the store."""
        pending = {}
        for path, key in self._keys.items():
            if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
                raise self._fail(f"is stored as {key!r}, which is not a name in the checkpoint", path)
            found = next((name for name in DESCRIPTIONS if f"{key}/{name}" in keys), None)
            if found is None:
                raise self._fail("is listed in the metadata, but its data is missing", path)
            with tensorstore_errors(self.files[0], path):
                pending[path] = (key, DESCRIPTIONS[found], store.read(f"{key}/{found}"))
        arrays = {}
        for path, (key, driver, future) in pending.items():
            with tensorstore_errors(self.files[0], path):
                text = future.result().value
            try:
                arrays[key] = parse(text, driver)
            except (ValueError, RecursionError) as error:
                raise self._fail(f"its zarr metadata {error}", path) from error
        return arrays

    def _check(self, present: Mapping[str | None, int], all_stored: bool) -> None:
        """Refuses arrays larger than what is stored can be, and, where all chunks were written, missing ones."""
        for path, key in self._keys.items():
            array = self._arrays[key]
            # One of the keys is the description.
            if all_stored and present[key] - 1 < array.chunk_count:
                raise self._fail(f"has {present[key] - 1} of {array.chunk_count} chunks", path)
        declared = sum(self._info("", array).nbytes for array in self._arrays.values())
        stored = sum(Path(parent, file).stat().st_size for parent, _, files in os.walk(self._folder) for file in files)
        if declared > stored * _MOST_PACKED:
            raise self._fail(f"declares {declared} bytes of arrays, and its files are {stored}, which cannot be")

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, in memory of its own; of one inside the msgpack file a view."""
        info = self.tensors[name]
        if name in self._located:
            assert self._inline is not None
            return self._inline.array(self._located[name].start, info.shape, info.dtype)
        array = self._arrays[self._keys[name]]
        with tensorstore_errors(self._folder, name):
            opened = self._opened(info)
            if in_one_window(info) or array.chunk_count == 1:
                return np.asarray(opened.read().result())
            data = np.empty(info.shape, opened.dtype.numpy_dtype)
            for window in windows(info.shape, array.chunks, data.itemsize):
                data[window] = opened[window].read().result()
            return data

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """A box of one tensor; of the files the chunks that it meets."""
        if name in self._located:
            return self.read(name)[box]
        with tensorstore_errors(self._folder, name):
            return np.asarray(self._opened(self.tensors[name])[box].read().result())

    def _opened(self, info: TensorInfo) -> Any:
        """The tensorstore of one array, which is not read yet."""
        key = self._keys[info.name]
        spec = array_spec(self._store, key, self._arrays[key].driver)
        opened = load_tensorstore().open(spec, context=self._context, open=True, read=True).result()
        if opened.shape != info.shape or opened.dtype.numpy_dtype != numpy_dtype(info.dtype):
            raise self._fail(f"is {opened.dtype} {opened.shape} now and was {info.dtype} {info.shape}", info.name)
        return opened

    def close(self) -> None:
        """Lets go of the files."""
        if self._inline is not None:
            self._inline.close()


def _owner(key: str, arrays: Mapping[str, ZarrArray]) -> str | None:
    """The array a key of the store belongs to."""
    end = key.rfind("/")
    while end > 0:
        if key[:end] in arrays:
            return key[:end]
        end = key.rfind("/", 0, end)
    return None


def _keys_alone(keys: Sequence[str]) -> dict[str, str]:
    """Path -> key where nothing but the store says what there is: orbax joins keys with dots."""
    names = [key.removesuffix(f"/{one}") for key in keys for one in DESCRIPTIONS if key.endswith(f"/{one}")]
    return {name.replace(".", "/"): name for name in names}


class OrbaxTree:
    """Orbax with one store for all arrays (OCDBT), as its handlers write by default."""

    name = "Orbax"
    scheme = None
    suffix = None

    def detect(self, path: Path) -> Path | None:
        """The folder of the tree: `path`, its `default`, `items` or `params`, or that of its last step."""
        return find_tree(path)

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The tree in a folder; its tensors are always their reader's own, but for those of an old msgpack file."""
        return OrbaxReader(file)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One part store per `max_shard_size` bytes, as Orbax writes one per process."""
        return orbax_write.part_layout(tensors, max_shard_size)

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        orbax_write.write_arrays(folder / file, tensors, source, ocdbt=True)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Makes one store of the parts, and writes the tree's metadata."""
        orbax_write.merge_parts(folder, list(layout))
        orbax_write.write_metadata(folder, [info for group in layout.values() for info in group], ocdbt=True)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        """`array` unchanged: Orbax stores every dtype as it is."""
        return array


class OrbaxZarr(OrbaxTree):
    """Orbax with a folder of files for every array (plain zarr, `use_ocdbt=False`), read by `OrbaxTree`."""

    name = "Orbax zarr"

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One folder per tensor."""
        return orbax_write.array_layout(tensors)

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        orbax_write.write_arrays(folder, tensors, source, ocdbt=False)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Writes the tree's metadata."""
        orbax_write.write_metadata(folder, [info for group in layout.values() for info in group], ocdbt=False)
