"""Arrays that are zarr folders of plain files, listed by an index of their own: EasyDeL's and T5X's.

Both are written through jax's `GlobalAsyncCheckpointManager`, that is tensorstore's `zarr` driver: `.zarray` and one
file per chunk. Declared sizes are checked against the files before anything is allocated.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from easytorch.bridge.core.mapped import check_announced
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.array_chunks import chunk_shape, windows
from easytorch.bridge.formats.pending_writes import PendingWrites, finished
from easytorch.bridge.formats.tensorstore_arrays import (
    array_spec,
    load_tensorstore,
    new_context,
    store_spec,
    tensorstore_errors,
)
from easytorch.bridge.formats.zarr_metadata import DESCRIPTIONS, ZarrArray, parse

_DESCRIPTION_LIMIT = 1 << 20
# What zstd makes of zeros: four bytes for 128 KiB.
_MOST_PACKED = 1 << 15
# Element types that tensorstore lacks.
_NOT_HELD = ("float8_e4m3", "uint4")


class ZarrFolders:
    """`tensors` by name, each in the folder below `root` that `folders` names; `index` is the file that lists them."""

    def __init__(self, root: Path, folders: Mapping[str, str], index: Path) -> None:
        self._root = root
        self._index = index
        self._folders = folders
        self._context = new_context()
        self._arrays = {name: self._described(name, folder) for name, folder in folders.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, array.shape, array.dtype, str(root / folders[name]))
            for name, array in self._arrays.items()
        }
        for name, info in self.tensors.items():
            self._check_size(name, info)

    def _fail(self, message: str, name: str) -> CheckpointError:
        return CheckpointError(
            f"{message}; copy the checkpoint again", file=self._root / self._folders[name], tensor=name
        )

    def _described(self, name: str, folder: str) -> ZarrArray:
        if not is_plain(folder):
            message = f"the index places it in {folder!r}, which is no folder beside it; correct the index"
            raise CheckpointError(message, file=self._index, tensor=name)
        file = next((one for one in DESCRIPTIONS if (self._root / folder / one).is_file()), None)
        if file is None:
            raise self._fail("is listed in the index, but its data is missing", name)
        try:
            with (self._root / folder / file).open("rb") as stream:
                array = parse(stream.read(_DESCRIPTION_LIMIT), DESCRIPTIONS[file])
        except OSError as error:
            raise self._fail(f"its zarr metadata cannot be read: {error.strerror}", name) from error
        except (ValueError, RecursionError) as error:
            raise self._fail(f"its zarr metadata {error}", name) from error
        if any(chunk > max(1, size) for chunk, size in zip(array.chunks, array.shape, strict=True)):
            raise self._fail(f"has chunks of {array.chunks}, larger than its shape {array.shape}", name)
        return array

    def _check_size(self, name: str, info: TensorInfo) -> None:
        folder, array = self._root / self._folders[name], self._arrays[name]
        sizes = [Path(parent, file).stat().st_size for parent, _, files in os.walk(folder) for file in files]
        # One of the files is the description.
        if len(sizes) - 1 < array.chunk_count and info.nbytes:
            raise self._fail(f"has {len(sizes) - 1} of {array.chunk_count} chunks", name)
        if info.nbytes > sum(sizes) * _MOST_PACKED:
            raise self._fail(f"declares {info.nbytes} bytes, and its files are {sum(sizes)}, which cannot be", name)

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, in memory of its own."""
        info, array = self.tensors[name], self._arrays[name]
        if not info.nbytes:
            return np.empty(info.shape, numpy_dtype(info.dtype))
        with tensorstore_errors(self._root / self._folders[name], name):
            spec = array_spec(store_spec(self._root, ocdbt=False), self._folders[name], array.driver)
            opened = load_tensorstore().open(spec, context=self._context, open=True, read=True).result()
            if opened.shape != info.shape or opened.dtype.numpy_dtype != numpy_dtype(info.dtype):
                raise self._fail(f"is {opened.dtype} {opened.shape} now and was {info.dtype} {info.shape}", name)
            data = np.empty(info.shape, opened.dtype.numpy_dtype)
            for window in windows(info.shape, array.chunks, data.itemsize):
                data[window] = opened[window].read().result()
            return data


def is_plain(path: str) -> bool:
    """Whether `path`, parts joined by "/", stays inside the folder it is taken from."""
    return bool(path) and not set(path) & set("\\:\0") and all(part not in ("", ".", "..") for part in path.split("/"))


def check_names(tensors: list[TensorInfo], program: str) -> None:
    """Refuses tensors that cannot be folders of their own in a checkpoint of `program`."""
    for info in tensors:
        if not is_plain(info.name) or "." in info.name:
            raise CheckpointError(f"is no path of plain names, as the folders of {program} are", tensor=info.name)
        if info.dtype in _NOT_HELD:
            raise CheckpointError(f"{program} has no dtype {info.dtype}; cast it to one it has", tensor=info.name)


def write_folder(folder: Path, info: TensorInfo, array: np.ndarray) -> None:
    """Writes `array` as the zarr folder `folder`, replacing what an earlier attempt left of it.

    Nothing is compressed: zstd saves a tenth of the size at best, at a third of the speed.
    """
    check_announced(info, array)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ts = load_tensorstore()
    chunks = chunk_shape(info)
    spec = array_spec(store_spec(folder.parent, ocdbt=False), folder.name, "zarr") | {
        "metadata": {"shape": list(info.shape), "chunks": list(chunks), "compressor": None},
        "create": True,
        "store_data_equal_to_fill_value": True,
    }
    with PendingWrites() as pending, tensorstore_errors(folder, info.name, writing=True):
        store = finished(ts.open(spec, dtype=ts.dtype(numpy_dtype(info.dtype)), context=new_context()))
        pending.array(store, array, chunks)
        pending.finish()
