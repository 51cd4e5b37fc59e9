"""The chunks that an array is stored in, and the boxes of them that are read at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from easytorch.bridge.core.tensor_info import TensorInfo

# A chunk is read whole.
_CHUNK_BYTES = 16 << 20
# Chunks are requested until so many bytes are in flight.
_WINDOW_BYTES = 64 << 20


def chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor's chunks: only the leading axes are split, to `_CHUNK_BYTES`."""
    shape = [max(1, size) for size in info.shape]
    size = TensorInfo("", tuple(shape), info.dtype).nbytes
    for axis, length in enumerate(info.shape):
        if size <= _CHUNK_BYTES:
            break
        row = size // shape[axis]
        # Chunks of equal length, so that the last one is not mostly padding.
        count = -(-length // max(1, _CHUNK_BYTES // row))
        shape[axis] = -(-length // count)
        size = row * shape[axis]
    return tuple(shape)


def in_one_window(info: TensorInfo) -> bool:
    """Whether a tensor is read at once."""
    return info.nbytes <= _WINDOW_BYTES


def windows(shape: Sequence[int], chunks: Sequence[int], itemsize: int) -> list[tuple[slice, ...]]:
    """Boxes of whole chunks that cover `shape`, each of `_WINDOW_BYTES` or one chunk, whichever is larger."""
    counts = [1] * len(shape)
    filled = itemsize
    for chunk in chunks:
        filled *= chunk
    for axis in reversed(range(len(shape))):
        whole = -(-shape[axis] // chunks[axis])
        counts[axis] = max(1, min(whole, _WINDOW_BYTES // filled))
        filled *= counts[axis]
        if counts[axis] < whole:
            break
    steps = [chunk * count for chunk, count in zip(chunks, counts, strict=True)]
    starts = product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True)))
    return [
        tuple(slice(at, min(at + step, size)) for at, step, size in zip(start, steps, shape, strict=True))
        for start in starts
    ]
