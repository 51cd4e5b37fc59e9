"""A tree of arrays as the bytes `flax.serialization.to_bytes` makes of it.

msgpack states lengths first, and shapes and dtypes are known before the data: the place of every element in the file is
known before any of them is read. Source: flax.serialization, flax 0.12.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgpack

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.parallel_write import Elements, Part

# Flax cuts larger arrays, because msgpack holds no object of 2**32 bytes and its readers stop at 2**31.
CHUNK_BYTES = 2**30
CHUNK_MARK = "__msgpack_chunked_array__"

InfoTree = Mapping[str, "InfoTree | TensorInfo"]


def tree_parts(tree: InfoTree) -> Iterator[Part]:
    """The parts of a file that holds `tree`, in order."""
    yield msgpack.Packer().pack_map_header(len(tree))
    for key, child in tree.items():
        yield msgpack.packb(key)
        if isinstance(child, TensorInfo):
            yield _leaf(child)
        else:
            yield from tree_parts(child)


def pair_parts(tensors: Iterable[TensorInfo]) -> Iterator[Part]:
    """The parts of a file of `(keys, value)` pairs: keys as a list of strings, every value encoded by `to_bytes`."""
    for info in tensors:
        leaf = _leaf(info)
        before = msgpack.Packer().pack_array_header(2) + msgpack.packb(info.name.split("/")) + _head(0xC4, leaf.nbytes)
        yield Elements(info, {**leaf.inserts, 0: before + leaf.inserts[0]})


def _leaf(info: TensorInfo) -> Elements:
    if info.nbytes <= CHUNK_BYTES:
        return Elements(info, {0: _frame(info.shape, info.dtype, info.nbytes)})
    itemsize = numpy_dtype(info.dtype).itemsize
    count, step = info.nbytes // itemsize, max(1, CHUNK_BYTES // itemsize)
    chunks = {
        start: msgpack.packb(str(start // step)) + _chunk_frame(min(step, count - start), info.dtype)
        for start in range(0, count, step)
    }
    head = msgpack.Packer().pack_map_header(3)
    head += msgpack.packb(CHUNK_MARK) + msgpack.packb(True)
    head += msgpack.packb("shape") + msgpack.packb({str(axis): size for axis, size in enumerate(info.shape)})
    head += msgpack.packb("chunks") + msgpack.Packer().pack_map_header(len(chunks))
    return Elements(info, {**chunks, 0: head + chunks[0]})


def _chunk_frame(count: int, dtype: str) -> bytes:
    return _frame((count,), dtype, count * numpy_dtype(dtype).itemsize)


def _frame(shape: tuple[int, ...], dtype: str, length: int) -> bytes:
    """Everything before an array's elements."""
    inner: bytes = msgpack.Packer().pack_array_header(3) + msgpack.packb(shape) + msgpack.packb(dtype)
    inner += _head(0xC4, length)
    total = len(inner) + length
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(total)
    return (_head(0xC7, total) if fixed is None else bytes([fixed])) + b"\x01" + inner


def _head(first: int, length: int) -> bytes:
    """The byte of a kind (bytes 0xC4, extension 0xC7) for the narrowest length that fits, and that length."""
    for step, width in enumerate((1, 2, 4)):
        if length < 1 << 8 * width:
            return bytes([first + step]) + length.to_bytes(width, "big")
    raise CheckpointError(f"msgpack cannot hold {length} bytes in one object")
