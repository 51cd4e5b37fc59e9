"""A file mapped into memory, and its byte ranges as numpy arrays without a copy."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo

if TYPE_CHECKING:
    from easytorch.bridge.formats.in_parts import InParts


class _ReadOnly(mmap.mmap):
    """A map of a file which knows where in memory it is."""

    address: int


def map_file(descriptor: int, writable: bool = False) -> mmap.mmap:
    """The bytes of an open file that is not empty; `writable` ones are changed in memory only."""
    if writable:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    made = _ReadOnly(descriptor, 0, access=mmap.ACCESS_READ)
    made.address = np.frombuffer(made, np.uint8).ctypes.data
    return made


class MappedFile:
    """The bytes of a file, mapped. `writable` arrays belong to their owner: changing them never reaches the file."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                stream.seek(0, 2)
                self.size = stream.tell()
                # An empty file cannot be mapped.
                self.bytes = map_file(stream.fileno(), writable) if self.size else b""
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from error

    def array(self, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A view of the elements from byte `start`; the caller has checked that they are inside the file."""
        element = numpy_dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.bytes, element, count, start).reshape(shape) if count else np.empty(shape, element)

    def close(self) -> None:
        """Lets go of the map; arrays made from it keep it alive until they are gone."""
        self.bytes = b""


def give_back(array: np.ndarray) -> None:
    """Unmaps the pages that `array` covers, so that they no longer count as memory of this process.

    They are read from the file again if they are needed again. To an array that is no view of a file nothing happens.
    """
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, memoryview) or not isinstance(base.obj, _ReadOnly) or not array.size:
        return
    start = array.ctypes.data - base.obj.address
    end = start + array.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        start, end = start + min(0, (size - 1) * stride), end + max(0, (size - 1) * stride)
    # Pages that reach beyond it are left to its neighbours.
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        base.obj.madvise(mmap.MADV_DONTNEED, start, end - start)


def check_announced(info: TensorInfo, array: np.ndarray | InParts) -> None:
    """Refuses an array that is not what `info` has announced to the file already."""
    if array.shape != info.shape or array.dtype != numpy_dtype(info.dtype):
        given = f"{array.dtype.name} {array.shape}"
        raise CheckpointError(f"announced as {info.dtype} {info.shape}, and {given} came", tensor=info.name)
