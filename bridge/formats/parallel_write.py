"""Writing files of tensors in parallel: every byte's offset is known before any data is read.

One thread transposes a block while another writes one. Writeback starts at once, so that little is left for the sync at
the end; pages of a mapped source are released as they are passed.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from easytorch.bridge.core.blocks import WRITE_BYTES, Copier, pieces
from easytorch.bridge.core.casting import CastOverflow
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.mapped import Unread, check_announced, give_back
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.threads import Threads
from easytorch.bridge.formats.base import Source

# Writes to one file are serialized in the kernel; more threads than this only use memory.
_MOST_THREADS = 4
# Bytes read at once, which should still be in the core's cache when they are written.
_READ_BYTES = 1 << 20
# Shorter writes are left to the sync: a disk request for each would cost more than it saves.
_HANDED_ON_BYTES = 1 << 20


@dataclass(frozen=True)
class Elements:
    """The elements of a tensor in C order; `inserts` are bytes that stand before the element of that number."""

    info: TensorInfo
    inserts: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.info.nbytes + sum(map(len, self.inserts.values()))


# One stretch of a file: bytes, or a tensor's elements.
Part = bytes | Elements


def write_parts(path: Path, parts: Iterable[Part], source: Source) -> None:
    """Writes the file `path`, which holds `parts` one after the other and nothing else.

    At most two tensors are held at a time: the one being written and the next.
    """
    with path.open("wb") as stream:
        _Writing(stream.fileno(), parts, source).run()


class _Whole:
    """An array in pieces, and how many of them are not written yet."""

    def __init__(self, array: np.ndarray | Unread) -> None:
        self.array = array
        self.pieces: list[np.ndarray | Unread] = []
        self.pieces.extend(array.pieces(_READ_BYTES) if isinstance(array, Unread) else pieces(array))
        self.waiting = len(self.pieces)


class _Tensor:
    """A tensor being written, whose first byte in the file is at `offset`."""

    def __init__(self, part: Elements, offset: int, data: InParts) -> None:
        self.info = part.info
        self.dtype = data.dtype
        self.parts = [_Whole(array) for array in data.parts]
        self.waiting = sum(part.waiting for part in self.parts)
        self._offset = offset
        self._inserts = sorted(part.inserts.items())
        self._starts = [start for start, _ in self._inserts]
        self._before = [0, *accumulate(len(insert) for _, insert in self._inserts)]

    def inserts(self) -> Iterator[tuple[int, bytes]]:
        """The bytes between the elements: (offset in the file, bytes)."""
        for (start, insert), before in zip(self._inserts, self._before, strict=False):
            yield self._offset + start * self.dtype.itemsize + before, insert

    def runs(self, start: int, content: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The bytes `content` of the elements from number `start` on, cut where something is inserted."""
        width = self.dtype.itemsize
        while content:
            place = bisect_right(self._starts, start)
            end = self._starts[place] if place < len(self._starts) else start + len(content) // width
            run = content[: (end - start) * width]
            yield self._offset + start * width + self._before[place], run
            content, start = content[len(run) :], end


# (piece, number of its first element, its array, its tensor)
_Task = tuple[_Tensor, _Whole, int, np.ndarray | Unread]


class _Writing:
    """One file being written."""

    def __init__(self, descriptor: int, parts: Iterable[Part], source: Source) -> None:
        self._descriptor = descriptor
        self._source = source
        self._work = self._handed_out(parts)
        self._handing_out = threading.Lock()
        self._counting = threading.Lock()
        self._failed = False

    def run(self) -> None:
        helpers = min(_MOST_THREADS, _processors()) - 1
        with Threads(max(1, helpers), self._stop) as pool:
            others = [pool.submit(self._write) for _ in range(helpers)]
            self._write()
            for other in others:
                other.result()

    def _stop(self) -> None:
        self._failed = True

    def _write(self) -> None:
        """Writes pieces until none is left, or another thread has failed."""
        copier = Copier()
        try:
            while not self._failed:
                with self._handing_out:
                    task = next(self._work, None)
                if task is None:
                    return
                tensor, whole, start, piece = task
                for offset, content in tensor.runs(start, _bytes(copier, tensor, piece)):
                    self._put(offset, content)
                self._passed(tensor, whole, piece)
                # Freed before the next tensor is read.
                del task, tensor, whole, piece
        except BaseException:
            self._stop()
            raise

    def _handed_out(self, parts: Iterable[Part]) -> Iterator[_Task]:
        """The pieces of every tensor, with the number of their first element; tensors are read one after the other."""
        offset = 0
        for part in parts:
            if isinstance(part, bytes):
                self._put(offset, part)
                offset += len(part)
                continue
            yield from self._pieces_of(part, offset)
            offset += part.nbytes

    def _pieces_of(self, part: Elements, offset: int) -> Iterator[_Task]:
        data = read_in_parts(self._source, part.info.name)
        check_announced(part.info, data)
        tensor = _Tensor(part, offset, data)
        for place, insert in tensor.inserts():
            self._put(place, insert)
        if not tensor.waiting:
            self._source.wrote(tensor.info)
        start = 0
        for whole in tensor.parts:
            for piece in whole.pieces:
                yield tensor, whole, start, piece
                start += piece.size

    def _passed(self, tensor: _Tensor, whole: _Whole, piece: np.ndarray | Unread) -> None:
        array = None if isinstance(whole.array, Unread) else whole.array
        if array is not None and array.flags.c_contiguous and not isinstance(piece, Unread):
            give_back(piece)
        with self._counting:
            whole.waiting -= 1
            tensor.waiting -= 1
            ended, last = whole.waiting == 0, tensor.waiting == 0
        if ended and array is not None:
            give_back(array)
        if last:
            self._source.wrote(tensor.info)

    def _put(self, offset: int, content: bytes | memoryview) -> None:
        left, place = memoryview(content), offset
        while left:
            written = os.pwrite(self._descriptor, left[:WRITE_BYTES], place)
            left, place = left[written:], place + written
        if len(content) >= _HANDED_ON_BYTES and hasattr(os, "posix_fadvise"):
            # Linux starts writeback of the dirty pages in the range, and drops only pages that are on disk already.
            os.posix_fadvise(self._descriptor, offset, len(content), os.POSIX_FADV_DONTNEED)


def _bytes(copier: Copier, tensor: _Tensor, piece: np.ndarray | Unread) -> memoryview:
    try:
        return copier.bytes_of(piece, tensor.dtype)
    except CastOverflow as error:
        raise error.of(tensor.info.name) from None


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
