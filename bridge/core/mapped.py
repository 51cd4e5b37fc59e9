"""A checkpoint's file: read by position, or memory-mapped where its arrays are kept.

convert, diff and inspect read (`pread`). A map is faster to set up but not to traverse, and if someone truncates the
file meanwhile, touching a missing page kills the process (SIGBUS); checking the size beforehand does not help, since it
may shrink right after. A read returns fewer bytes instead, which is an ordinary error. Every read also compares the
file's state with that at opening, before and after: new bytes under an old header would be a checkpoint that never
existed. Copying to the reader's own memory costs no more than a map's page faults.

`writable` arrays, which models keep, are a private map, so that they cost no memory until they are written.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError

if TYPE_CHECKING:
    from easytorch.bridge.core.in_parts import InParts

# Read-ahead for headers that are parsed piece by piece.
_WINDOW_BYTES = 64 << 10
# Arrays from this size on are mapped, not allocated by malloc.
_LARGE_BYTES = 1 << 20


class _ReadOnly(mmap.mmap):
    """A map of a file that knows its address."""

    address: int


class _Anonymous(mmap.mmap):
    """Anonymous memory, without a file."""


def room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array for elements that are about to be read; a large one returns to the system as soon as it is freed.

    malloc keeps freed memory for later, in every thread: conversions would hold several tensors more.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return np.empty(shape, dtype)
    memory = _Anonymous(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def stands_in_file(array: np.ndarray) -> bool:
    """Whether the elements are in a mapped file; note that tensorstore's arrays do not own numpy memory either."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) and not isinstance(base.obj, _Anonymous)


def map_file(descriptor: int, writable: bool = False) -> mmap.mmap:
    """The bytes of an open file that is not empty; `writable` ones are changed in memory only."""
    if writable:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    made = _ReadOnly(descriptor, 0, access=mmap.ACCESS_READ)
    made.address = np.frombuffer(made, np.uint8).ctypes.data
    return made


class ReadFile:
    """The bytes of a file as it was when opened: `CheckpointError` where it has changed since, or is gone.

    No descriptor is kept: checkpoints have more shards than a process may have files open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as descriptor:
            self._state = _state(descriptor)
        self.size = self._state[2]
        # The cached read-ahead, (start, bytes); replaced in one assignment, as threads share it.
        self._window = 0, b""

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=self.path) from error

    def read_into(self, start: int, out: memoryview) -> None:
        """Fills the bytes `out` with those from `start` on."""
        with self._opened() as descriptor:
            self._unchanged(descriptor)
            while out:
                count = os.preadv(descriptor, [out], start)
                if not count:
                    raise self._changed()
                out, start = out[count:], start + count
            self._unchanged(descriptor)

    def strided(self, start: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
        """At least one element, from byte `start` on, with `strides` in bytes, none negative."""
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + dtype.itemsize
        content = room((reach,), np.dtype(np.uint8))
        self.read_into(start, content.data)
        return np.ndarray(shape, dtype, content.data, 0, strides)

    def __getitem__(self, span: slice) -> bytes:
        """Bytes of the file; short at its end, as of `bytes`."""
        start, end, _ = span.indices(self.size)
        first, window = self._window
        if not first <= start <= end <= first + len(window):
            content = bytearray(min(max(end - start, _WINDOW_BYTES), self.size - start))
            self.read_into(start, memoryview(content))
            if end - start > _WINDOW_BYTES:
                return bytes(memoryview(content)[: end - start])
            first, window = self._window = start, bytes(content)
        return window[start - first : end - first]

    def __len__(self) -> int:
        return self.size

    def _unchanged(self, descriptor: int) -> None:
        if _state(descriptor) != self._state:
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError("was changed while it was being read; start again when nobody writes it", file=self.path)


def _state(descriptor: int) -> tuple[int, int, int, int]:
    """The device, inode, size and modification time, which identify a file and its content."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Unread:
    """Elements in a file, in C order, that have not been read yet."""

    file: ReadFile
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read_into(self, out: np.ndarray) -> None:
        """Fills `out`, which is contiguous and has the same dtype and number of elements."""
        if self.size:
            self.file.read_into(self.start, out.reshape(-1).view(np.uint8).data)

    def read(self) -> np.ndarray:
        """The elements, in memory of their own."""
        made = room(self.shape, self.dtype)
        self.read_into(made)
        return made

    def pieces(self, nbytes: int) -> Iterator[Unread]:
        """Consecutive runs of about `nbytes`."""
        width = self.dtype.itemsize
        step = max(1, nbytes // width)
        for first in range(0, self.size, step):
            yield Unread(self.file, self.start + first * width, (min(step, self.size - first),), self.dtype)


class MappedFile:
    """A file whose byte ranges are arrays: read on demand, or views of a map.

    `writable` arrays are mapped and belong to their owner: changing them never reaches the file.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        self.bytes: mmap.mmap | ReadFile | bytes
        if not writable:
            self.bytes = ReadFile(path)
            self.size = self.bytes.size
            return
        try:
            with path.open("rb") as stream:
                stream.seek(0, 2)
                self.size = stream.tell()
                # An empty file cannot be mapped.
                self.bytes = map_file(stream.fileno(), writable) if self.size else b""
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from error

    def array(self, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The elements from byte `start`; the caller has checked that they are inside the file."""
        found = self.elements(start, shape, dtype)
        return found.read() if isinstance(found, Unread) else found

    def elements(self, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray | Unread:
        """The same, not read yet where they are not mapped."""
        element = numpy_dtype(dtype)
        if isinstance(self.bytes, ReadFile):
            return Unread(self.bytes, start, shape, element)
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.bytes, element, count, start).reshape(shape) if count else np.empty(shape, element)

    def strided(self, start: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> np.ndarray:
        """Elements from byte `start` on, with `strides` in bytes, none negative."""
        element = numpy_dtype(dtype)
        if isinstance(self.bytes, ReadFile):
            return self.bytes.strided(start, shape, element, strides)
        return np.ndarray(shape, element, self.bytes, start, strides)

    def close(self) -> None:
        """Releases the map; arrays made from it keep it alive."""
        self.bytes = b""


def give_back(array: np.ndarray) -> None:
    """Unmaps the pages that `array` covers, so that they no longer count as memory of this process.

    They are read from the file again when needed. An array that is not a view of a file is left alone.
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
    # Pages shared with its neighbours are kept.
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        base.obj.madvise(mmap.MADV_DONTNEED, start, end - start)


def check_announced(info: TensorInfo, array: np.ndarray | InParts) -> None:
    """Refuses an array that does not match `info`, which is in the file's header already."""
    if array.shape != info.shape or array.dtype != numpy_dtype(info.dtype):
        given = f"{array.dtype.name} {array.shape}"
        raise CheckpointError(f"announced as {info.dtype} {info.shape}, and {given} came", tensor=info.name)
