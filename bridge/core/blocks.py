"""Arrays as their bytes in C order, block by block: strided views are never copied whole, transposed ones are fast.

Copying a transposed matrix element by element misses the cache each time: numpy and torch do 0.25 to 0.5 GB/s. Here the
rows and columns of one block are first gathered in memory order and then transposed within the cache: 2 to 3 GB/s on
one core of an EPYC (Zen 4) for elements of two and four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from easytorch.bridge.core.casting import cast_into
from easytorch.bridge.core.mapped import Unread, give_back

# Bytes written in one call. From 2 MB on, Linux looks for free memory in blocks as large and compacts memory to get
# them: a half to a tenth of the speed (ext4, Linux 6.18).
WRITE_BYTES = 512 << 10
# The pieces of a contiguous array, which are not copied.
_PLAIN_BYTES = 8 << 20
# The blocks in which a strided array is copied.
_BLOCK_BYTES = 1 << 20
# The shortest contiguous read that a block should give: shorter runs waste the cache lines and pages they touch ...
_RUN_BYTES = 256
# ... and a block may grow to this for it.
_LARGEST_BLOCK_BYTES = 32 << 20
# A tile to transpose: with its copy it fits into a core's second-level cache.
_TILE_BYTES = 512 << 10
# Matrices of at least this many elements are transposed in tiles; below, that costs more than it gains.
_TILED_ELEMENTS = 60 * 60


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """`array` in views that are consecutive runs of its elements in C order, each small enough to be copied."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        step = _PLAIN_BYTES // array.itemsize
        yield from (flat[start : start + step] for start in range(0, flat.size, step))
        return
    view = _joined(array)
    axis, rows = _cut(view)
    for index in np.ndindex(view.shape[:axis]):
        part = view[index]
        yield from (part[start : start + rows] for start in range(0, len(part), rows))


def _cut(view: np.ndarray) -> tuple[int, int]:
    """The dimension along which blocks are cut (those before it are indexed), and its length in one block."""
    inner = [math.prod(view.shape[axis + 1 :]) * view.itemsize for axis in range(view.ndim)]
    axis = next(axis for axis, size in enumerate(inner) if size <= _BLOCK_BYTES or axis == view.ndim - 1)
    # Indexing the dimension that is dense in memory would leave single elements far from each other.
    dense = min(range(view.ndim), key=lambda axis: abs(view.strides[axis]))
    if dense < axis and inner[dense] <= _LARGEST_BLOCK_BYTES:
        axis = dense
    rows = _BLOCK_BYTES // inner[axis]
    if axis == dense:
        rows = max(rows, min(_RUN_BYTES // view.itemsize, _LARGEST_BLOCK_BYTES // inner[axis]))
    return axis, max(1, rows)


def _joined(array: np.ndarray) -> np.ndarray:
    """The same elements with neighbouring dimensions merged where strides allow, and none of size 1."""
    shape: list[int] = []
    stride = 0
    for size, step in zip(array.shape, array.strides, strict=True):
        if size == 1:
            continue
        if shape and stride == size * step:
            shape[-1] *= size
        else:
            shape.append(size)
        stride = step
    return array.reshape(shape)


class Copier:
    """Makes pieces contiguous in buffers that it reuses; one for each thread."""

    def __init__(self) -> None:
        # Buffers for a piece, its gathered rows, their transpose, and the cast piece.
        self._memory = [np.empty(0, np.uint8) for _ in range(4)]

    def bytes_of(self, piece: np.ndarray | Unread, dtype: np.dtype | None = None) -> memoryview:
        """The bytes of `piece` in C order: its own memory if it is contiguous, else valid until the next call.

        dtype: what its elements are cast to, as `core.casting` does.
        """
        given = piece.dtype
        if isinstance(piece, Unread):
            unread, piece = piece, self._array(0, given, piece.shape)
            unread.read_into(piece)
        if not piece.flags.c_contiguous:
            piece = self._copied(_joined(_plain(piece)))
        flat = piece.reshape(-1)
        if dtype is not None and dtype != given:
            cast = self._array(3, dtype, flat.shape)
            cast_into(cast, flat.view(given))
            flat = cast
        return flat.view(np.uint8).data

    def _copied(self, piece: np.ndarray) -> np.ndarray:
        made = self._array(0, piece.dtype, piece.shape)
        last = piece.ndim - 1
        # The dimensions in the order of memory.
        order = sorted(range(piece.ndim), key=lambda axis: abs(piece.strides[axis]), reverse=True)
        if order[-1] == last or piece.size < _TILED_ELEMENTS:
            np.copyto(made, piece)
            return made
        step = max(1, _TILE_BYTES * piece.shape[last] // piece.nbytes)
        for start in range(0, piece.shape[last], step):
            window = (..., slice(start, start + step))
            np.copyto(made[window], self._turned(piece[window], order))
        return made

    def _turned(self, tile: np.ndarray, order: list[int]) -> np.ndarray:
        """The elements of `tile`, with the last dimension dense in memory unless it is short."""
        gathered = self._array(1, tile.dtype, [tile.shape[axis] for axis in order])
        np.copyto(gathered, tile.transpose(order))
        last = tile.ndim - 1
        place = order.index(last)
        matrices = gathered.reshape(math.prod(gathered.shape[:place]), tile.shape[last], -1)
        if matrices[0].size < _TILED_ELEMENTS:
            return gathered.transpose(np.argsort(order))
        order = [*order[:place], *order[place + 1 :], last]
        turned = self._array(2, tile.dtype, [tile.shape[axis] for axis in order])
        _turn(matrices, turned)
        return turned.transpose(np.argsort(order))

    def _array(self, which: int, dtype: np.dtype, shape: list[int] | tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if self._memory[which].nbytes < size:
            self._memory[which] = np.empty(size, np.uint8)
        return self._memory[which][:size].view(dtype).reshape(shape)


def _plain(array: np.ndarray) -> np.ndarray:
    """The same bits as integers, which numpy copies faster than ml_dtypes' types."""
    return array.view(f"i{array.itemsize}") if array.itemsize <= 8 else array


def _turn(matrices: np.ndarray, out: np.ndarray) -> None:
    """(count, n, m) -> (count, m, n), both contiguous and in the cache, where numpy's loops are as fast as torch's."""
    count, rows, columns = matrices.shape
    np.copyto(out.reshape(count, columns, rows), matrices.swapaxes(1, 2))


def contiguous(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """`array` in C order: itself where it is so already and no `out` is given, else copied into `out` or new memory."""
    if out is None and array.flags.c_contiguous:
        return array
    made = np.empty(array.shape, array.dtype) if out is None else out
    target, copier, start = made.reshape(-1).view(np.uint8), Copier(), 0
    for piece in pieces(array):
        content = copier.bytes_of(piece)
        target[start : start + len(content)] = np.frombuffer(content, np.uint8)
        start += len(content)
    return made


def byte_blocks(array: np.ndarray | Unread) -> Iterator[memoryview]:
    """The bytes of `array` in C order; each block is valid until the next one.

    Pages of a mapped file are released as they are passed.
    """
    copier = Copier()
    if isinstance(array, Unread):
        yield from map(copier.bytes_of, array.pieces(WRITE_BYTES))
        return
    for piece in pieces(array):
        content = copier.bytes_of(piece)
        yield from (content[start : start + WRITE_BYTES] for start in range(0, len(content), WRITE_BYTES))
        if array.flags.c_contiguous:
            give_back(piece)
    give_back(array)
