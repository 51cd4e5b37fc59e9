"""Arrays compared and viewed bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from easytorch.bridge.core.blocks import byte_blocks
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.mapped import Unread


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, so that NaN equals itself and -0 differs from 0; complex128 as pairs."""
    if array.dtype.itemsize > 8:
        return np.ascontiguousarray(array).view(np.uint64)
    return array.view(f"u{array.dtype.itemsize}")


def identical(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether dtype, shape and every bit agree; identical memory is not read, and no whole array is copied."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.strides == other.strides and one.ctypes.data == other.ctypes.data:
        return True
    return _same_bytes(byte_blocks(one), byte_blocks(other))


def identical_parts(one: InParts, other: InParts) -> bool:
    """`identical` for elements that may not have been read yet: files are compared block by block."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if all(isinstance(part, Unread) for part in (*one.parts, *other.parts)) and one == other:
        return True
    return _same_bytes(_blocks(one), _blocks(other))


def _blocks(data: InParts) -> Iterator[memoryview]:
    for part in data.parts if data.dtype == data.stored else [data.whole()]:
        yield from byte_blocks(part)


def _same_bytes(left: Iterator[memoryview], right: Iterator[memoryview]) -> bool:
    mine = theirs = memoryview(b"")
    while True:
        mine, theirs = mine or next(left, mine), theirs or next(right, theirs)
        length = min(len(mine), len(theirs))
        if not length:
            return True
        if not np.array_equal(np.frombuffer(mine[:length], np.uint8), np.frombuffer(theirs[:length], np.uint8)):
            return False
        mine, theirs = mine[length:], theirs[length:]
