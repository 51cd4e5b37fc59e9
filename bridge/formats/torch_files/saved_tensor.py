"""One tensor as `torch.save` writes it, inside a mapped file: located without unpickling, read without a copy.

Source: torch.serialization of torch 2.13: a zip archive, entries stored, of `data.pkl`, which holds the tensor's
offset, sizes and strides, and `data/0`, the storage.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.dtypes import is_dtype, numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.torch_files.inert_pickle import Made, Name, read_pickle

_PICKLE_LIMIT = 1 << 20
_ALLOWED = re.compile(
    r"collections\.OrderedDict|torch\.(\w+Storage|float\w+|bfloat16|u?int\w+|bool|complex\w+)"
    r"|torch\.storage\.(UntypedStorage|TypedStorage)|torch\._utils\._rebuild_(tensor_v2|tensor_v3|parameter)"
)
_STORAGES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Double": "float64",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_DATA = re.compile(r"[^/]+/data\.pkl")
_LOCAL_HEADER = 30


class Stretch(io.RawIOBase):
    """Bytes `start` to `end` of a mapped file, as a file of its own."""

    def __init__(self, mapped: MappedFile, start: int, end: int) -> None:
        self._mapped, self._start, self._size = mapped, start, end - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        self._at += length
        return self._mapped.bytes[self._start + self._at - length : self._start + self._at]


@dataclass(frozen=True)
class _Layout:
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_saved(mapped: MappedFile, start: int, end: int, name: str) -> np.ndarray:
    """The tensor in bytes `start` to `end`, a view of a mapped file; `CheckpointError` for anything else there."""
    try:
        with zipfile.ZipFile(Stretch(mapped, start, end)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            pickled = next(entry for key, entry in entries.items() if _DATA.fullmatch(key))
            root = pickled.filename.removesuffix("data.pkl")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("a compressed entry")
            if pickled.file_size > _PICKLE_LIMIT or f"{root}data/1" in entries:
                raise ValueError("more than one tensor")
            order = entries.get(f"{root}byteorder")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("big-endian data")
            content = archive.read(pickled)
        layout = _layout(read_pickle(content, mapped.path, lambda dotted: _ALLOWED.fullmatch(dotted) is not None))
        storage = entries[f"{root}data/0"]
        first = start + storage.header_offset + _LOCAL_HEADER
        lengths = mapped.bytes[first - 4 : first]
        first += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        return _view(mapped, layout, first, storage.file_size, end)
    except (zipfile.BadZipFile, ValueError, KeyError, StopIteration, OSError, NotImplementedError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"is not a saved tensor ({reason}); save it again", file=mapped.path, tensor=name
        ) from error


def _layout(value: Any) -> _Layout:
    """The layout of the tensor that `torch._utils._rebuild_tensor_v2` (v3: with a separate dtype) would make."""
    if isinstance(value, Made) and value.name == "torch._utils._rebuild_parameter" and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Made) or not value.name.startswith("torch._utils._rebuild_tensor_v"):
        raise ValueError(f"a {value.name if isinstance(value, Made) else type(value).__name__}")
    arguments = value.arguments
    if len(arguments) < 6 or not isinstance(arguments[0], Made) or len(arguments[0].arguments) < 3:
        raise ValueError("a tensor without its parts")
    offset, shape, strides = arguments[1:4]
    kind = arguments[0].arguments[1]
    if value.name.endswith("v3"):
        kind = arguments[6]
    if not isinstance(kind, Name):
        raise ValueError("no element type")
    last = kind.dotted.rpartition(".")[2]
    dtype = _STORAGES.get(last.removesuffix("Storage"), last)
    numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
    if any(type(number) is not int or number < 0 for number in numbers) or len(shape) != len(strides):
        raise ValueError("sizes that are none")
    if not is_dtype(dtype):
        raise ValueError(f"elements of type {last}")
    return _Layout(dtype, offset, shape, strides)


def _view(mapped: MappedFile, layout: _Layout, first: int, nbytes: int, end: int) -> np.ndarray:
    width = numpy_dtype(layout.dtype).itemsize
    if first + nbytes > end:
        raise ValueError("a storage beyond the end")
    if 0 in layout.shape:
        return np.empty(layout.shape, numpy_dtype(layout.dtype))
    pairs = zip(layout.shape, layout.strides, strict=True)
    last = layout.offset + sum((size - 1) * stride for size, stride in pairs)
    if (last + 1) * width > nbytes or math.prod(layout.shape) * width > nbytes:
        raise ValueError("a tensor larger than its storage")
    steps = tuple(stride * width for stride in layout.strides)
    return mapped.strided(first + layout.offset * width, layout.shape, layout.dtype, steps)
