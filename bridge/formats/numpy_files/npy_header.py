"""The header of numpy's `.npy`: a magic, a length and a Python dict literal with `descr`, `fortran_order`, `shape`.

Source: numpy.lib.format; the dict is parsed as a literal and never evaluated.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.tensor_info import MAX_RANK, TensorInfo
from easytorch.bridge.dtypes import is_dtype, numpy_dtype
from easytorch.bridge.errors import CheckpointError

# numpy itself reads no longer header.
HEADER_BYTES = 10_000 + 12
_MAGIC = b"\x93NUMPY"
_KEYS = {"descr", "fortran_order", "shape"}
_DESCR = re.compile(r"([<>|=])([biufcV])([1-9]\d?)")
# What an npz holds of a bfloat16 array: two bytes without a meaning.
_BFLOAT16 = "|V2"
# Bytes of an array, empty dimensions left out, fit a signed 64-bit number; the largest element has 16.
_MOST_ELEMENTS = 2**59
# Version -> width of the length; 2 is for longer headers, 3 for names in UTF-8.
_LENGTH_WIDTHS = {1: 2, 2: 4, 3: 4}


@dataclass(frozen=True)
class NpyHeader:
    """A checked header of a .npy file. `start`: the offset of the elements in the file."""

    shape: tuple[int, ...]
    dtype: str
    swapped: bool
    fortran_order: bool
    start: int

    @property
    def nbytes(self) -> int:
        return TensorInfo("", self.shape, self.dtype).nbytes

    def array(self, data: Any, start: int) -> np.ndarray:
        """The elements at `start` of `data`: a view unless their bytes are in the other order."""
        element = numpy_dtype(self.dtype)
        count = int(np.prod(self.shape, dtype=np.int64))
        if count == 0:
            return np.empty(self.shape, element)
        flat = np.frombuffer(data, element, count, start)
        if self.swapped:
            flat = flat.byteswap()
        return flat.reshape(self.shape, order="F" if self.fortran_order else "C")


def read_npy_header(content: bytes, file: Path, name: str) -> NpyHeader:
    """The header at the start of `content`; `CheckpointError` for anything numpy would not have written."""

    def fail(message: str) -> CheckpointError:
        return CheckpointError(f"{message}; download or save the file again", file=file, tensor=name)

    width = _LENGTH_WIDTHS.get(content[6] if len(content) > 6 else 0)
    if content[:6] != _MAGIC or width is None:
        raise fail("does not start as a .npy file of version 1, 2 or 3")
    start = 8 + width + int.from_bytes(content[8 : 8 + width], "little")
    if start > min(len(content), HEADER_BYTES):
        raise fail(f"is truncated, or its header of {start} bytes is no header")
    try:
        fields = ast.literal_eval(content[8 + width : start].decode("utf-8" if width == 4 else "latin1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, UnicodeDecodeError) as error:
        raise fail("has a header that is not a Python literal") from error
    if not isinstance(fields, dict) or set(fields) != _KEYS or type(fields["fortran_order"]) is not bool:
        raise fail("has a header without descr, fortran_order and shape")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise fail(f"has the shape {shape!r}, which is not a tuple of sizes")
    if len(shape) > MAX_RANK or math.prod(size for size in shape if size) > _MOST_ELEMENTS:
        raise fail(f"has the shape {shape!r}, more than an array can have")
    dtype, swapped = _element(fields["descr"], fail)
    return NpyHeader(shape, dtype, swapped, fields["fortran_order"], start)


def _element(descr: Any, fail: Any) -> tuple[str, bool]:
    """The element type of numpy's `descr`, and whether its bytes are in the order this machine does not use."""
    parts = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if parts is None:
        raise fail(f"holds {descr!r}, not numbers; objects are pickled, and nothing is unpickled here")
    order, kind, size = parts.groups()
    if kind == "V":
        if size == "2":
            return "bfloat16", False
        raise fail(f"holds {descr!r}: numpy has lost which element type that was")
    try:
        dtype = np.dtype(f"{kind}{size}")
    except TypeError as error:
        raise fail(f"holds {descr!r}, which is no element type") from error
    if not is_dtype(dtype.name):
        raise fail(f"holds {descr!r}, an element type no checkpoint has")
    native = "<" if sys.byteorder == "little" else ">"
    return dtype.name, order in "<>" and order != native and dtype.itemsize > 1


def npy_bytes(info: TensorInfo) -> bytes:
    """The header of `info`, padded as numpy pads it; `CheckpointError` for an element type numpy has no name for."""
    element = numpy_dtype(info.dtype)
    if info.dtype == "bfloat16":
        descr = _BFLOAT16
    elif element.type.__module__ == "numpy":
        descr = element.str
    else:
        raise CheckpointError(
            f"is {info.dtype}, which an npz cannot name; convert with dtype bfloat16, or write another format",
            tensor=info.name,
        )
    text = repr({"descr": descr, "fortran_order": False, "shape": info.shape})
    padding = -(10 + len(text) + 1) % 64
    length = len(text) + padding + 1
    assert length < 1 << 16, "a shape of at most 32 sizes fits version 1"
    return _MAGIC + bytes([1, 0]) + length.to_bytes(2, "little") + text.encode("latin1") + b" " * padding + b"\n"
