"""A file mapped into memory, its byte ranges as numpy arrays without a copy, and arrays as a stream of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo

# Large enough that a write call costs nothing beside its data, small enough to stay in a processor's cache.
_BLOCK_BYTES = 4 << 20


class MappedFile:
    """The bytes of a file, mapped. `writable` arrays belong to their owner: changing them never reaches the file."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                stream.seek(0, 2)
                self.size = stream.tell()
                # An empty file cannot be mapped.
                access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
                self.bytes = mmap.mmap(stream.fileno(), 0, access=access) if self.size else b""
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


def byte_blocks(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of `array` in C order, of a transposed view a few megabytes at a time: never copied whole."""
    if array.flags.c_contiguous or array.nbytes <= _BLOCK_BYTES:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return
    rows = _BLOCK_BYTES * array.shape[0] // array.nbytes
    if rows == 0:
        for row in array:
            yield from byte_blocks(row)
    else:
        for start in range(0, array.shape[0], rows):
            yield from byte_blocks(np.ascontiguousarray(array[start : start + rows]))


def check_announced(info: TensorInfo, array: np.ndarray) -> None:
    """Refuses an array that is not what `info` has announced to the file already."""
    if array.shape != info.shape or array.dtype != numpy_dtype(info.dtype):
        given = f"{array.dtype.name} {array.shape}"
        raise CheckpointError(f"announced as {info.dtype} {info.shape}, and {given} came", tensor=info.name)
