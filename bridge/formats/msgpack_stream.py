"""A tree of arrays as the bytes `flax.serialization.to_bytes` makes of it, written as the arrays come.

msgpack states lengths first, and shapes and dtypes are known before the data, so nothing is held: the frame of an array
is written, then its elements. Source: flax.serialization, flax 0.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import msgpack
import numpy as np

from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Source, TensorInfo
from easytorch.bridge.formats.mapped import byte_blocks, check_announced

# Flax cuts larger arrays, because msgpack holds no object of 2**32 bytes and its readers stop at 2**31.
CHUNK_BYTES = 2**30
CHUNK_MARK = "__msgpack_chunked_array__"

InfoTree = Mapping[str, "InfoTree | TensorInfo"]


def write_tree(stream: BinaryIO, tree: InfoTree, source: Source) -> None:
    """Writes `tree` with the elements `source` gives, in the order of its leaves."""
    stream.write(msgpack.Packer().pack_map_header(len(tree)))
    for key, child in tree.items():
        stream.write(msgpack.packb(key))
        if isinstance(child, TensorInfo):
            _write_leaf(stream, child, source.read(child.name))
            source.wrote(child)
        else:
            write_tree(stream, child, source)


def _write_leaf(stream: BinaryIO, info: TensorInfo, array: np.ndarray) -> None:
    check_announced(info, array)
    if info.nbytes <= CHUNK_BYTES:
        stream.write(_frame(info.shape, info.dtype, info.nbytes))
        for block in byte_blocks(array):
            stream.write(block)
        return
    itemsize = numpy_dtype(info.dtype).itemsize
    step = max(1, CHUNK_BYTES // itemsize) * itemsize
    stream.write(msgpack.Packer().pack_map_header(3))
    stream.write(msgpack.packb(CHUNK_MARK) + msgpack.packb(True))
    stream.write(msgpack.packb("shape") + msgpack.packb({str(axis): size for axis, size in enumerate(info.shape)}))
    stream.write(msgpack.packb("chunks") + msgpack.Packer().pack_map_header(-(-info.nbytes // step)))
    written = 0
    for block in byte_blocks(array):
        while block:
            if written % step == 0:
                length = min(step, info.nbytes - written)
                stream.write(msgpack.packb(str(written // step)) + _frame((length // itemsize,), info.dtype, length))
            piece = block[: step - written % step]
            stream.write(piece)
            written += len(piece)
            block = block[len(piece) :]


def _frame(shape: tuple[int, ...], dtype: str, length: int) -> bytes:
    """Everything before an array's elements."""
    inner = msgpack.Packer().pack_array_header(3) + msgpack.packb(shape) + msgpack.packb(dtype)
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
