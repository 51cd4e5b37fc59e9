"""The header of a GGUF file: its metadata and where each tensor stands, every number checked against the file's size.

Layout (ggml, docs/gguf.md): `GGUF`, a version, the counts of tensors and of metadata entries, the entries, the tensors'
names, sizes, types and offsets, padding up to the alignment, then the data, each tensor padded to the alignment.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.errors import CheckpointError

if TYPE_CHECKING:
    from easytorch.bridge.core.mapped import ReadFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Of the data of every tensor, where the metadata does not say otherwise.
ALIGNMENT = 32
# ggml's GGML_MAX_DIMS.
MAX_DIMENSIONS = 4
# Arrays of arrays are in the format, and nobody writes them deep.
_MAX_DEPTH = 4
# What the smallest entry and the smallest tensor take: a name's length, a type, a value; dimensions and an offset more.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Stored:
    """One tensor as the header states it; `kind` is ggml's name of the element type, `start` counts from the file's."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


class Header:
    """`fields`: metadata by key (numbers, text, bool, lists, and numpy arrays of numbers). `tensors`: in file order.

    `kinds`: the number of each field's type, which its value does not tell of a single number.
    """

    def __init__(self, path: Path, data: mmap.mmap | ReadFile | bytes, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0
        self.fields: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        self.tensors: list[Stored] = []
        if self._take(4) != _MAGIC:
            raise self._fail("is not GGUF: it does not begin with those letters")
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = "; it is for big-endian machines" if version & 0xFFFF == 0 else ""
            raise self._fail(f"is of GGUF version {version}, and {_VERSIONS} are read here{swapped}")
        tensors, entries = self._number("<Q"), self._number("<Q")
        self._bound(entries, _LEAST_ENTRY, "metadata entries")
        for _ in range(entries):
            self._entry()
        self._bound(tensors, _LEAST_TENSOR, "tensors")
        declared = [self._declaration() for _ in range(tensors)]
        self._place(declared, self._alignment())

    def _fail(self, message: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(f"{message}; download or convert the file again", file=self._path, tensor=tensor)

    def _bound(self, count: int, least: int, what: str) -> None:
        if count * least > self._size - self._at:
            raise self._fail(f"claims {count} {what}, and {self._size - self._at} bytes are left")

    def _take(self, length: int) -> bytes:
        if length > self._size - self._at:
            raise self._fail(f"is truncated: {length} bytes wanted at {self._at} of {self._size}")
        self._at += length
        return self._data[self._at - length : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _text(self, errors: str = "strict") -> str:
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self._fail(f"has a name that is not UTF-8 ({error.reason})") from error

    def _entry(self) -> None:
        key = self._text()
        if key in self.fields:
            raise self._fail(f"has the metadata {key!r} twice")
        self.kinds[key] = self._number("<I")
        self.fields[key] = self._value(self.kinds[key], 0)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        if kind == _STRING:
            return self._text("replace")
        if kind != _ARRAY or depth > _MAX_DEPTH:
            raise self._fail(f"has metadata of the unknown type {kind}" if kind != _ARRAY else "nests arrays too deep")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            return self._numbers(inner, count)
        self._bound(count, 8 if inner == _STRING else 12, "array elements")
        if inner == _STRING:
            # Tokens of some vocabularies are not whole characters; with these escapes they can be written again.
            return [self._text("surrogateescape") for _ in range(count)]
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        element = np.dtype(_SCALARS[kind])
        self._bound(count, element.itemsize, "array elements")
        raw = self._take(count * element.itemsize)
        return np.frombuffer(raw, "u1").astype(bool) if element.kind == "b" else np.frombuffer(raw, element)

    def _declaration(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        rank = self._number("<I")
        if rank > MAX_DIMENSIONS:
            raise self._fail(f"has {rank} dimensions, more than the format's {MAX_DIMENSIONS}", name)
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _alignment(self) -> int:
        found = self.fields.get("general.alignment", ALIGNMENT)
        if not isinstance(found, int) or found < 1 or found & (found - 1):
            raise self._fail(f"states the alignment {found!r}, which is not a power of two")
        return found

    def _place(self, declared: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> None:
        first = _padded(self._at, alignment)
        for name, shape, number, offset in declared:
            kind, nbytes = self._storage(name, shape, number)
            if offset % alignment:
                raise self._fail(f"starts at {offset}, which the alignment {alignment} does not divide", name)
            if offset + nbytes > self._size - first:
                raise self._fail(
                    f"is truncated: {nbytes} bytes wanted at {first + offset}, the file has {self._size}", name
                )
            self.tensors.append(Stored(name, shape, kind, first + offset, nbytes))
        self._check_apart(alignment)

    def _storage(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if number not in GGMLQuantizationType._value2member_map_:
            raise self._fail(f"is of the unknown type {number}, or a newer gguf package is needed for it", name)
        kind = GGMLQuantizationType(number)
        block, width = GGML_QUANT_SIZES[kind]
        count = 1
        for size in shape:
            count *= size
        if (shape[-1] if shape else 1) % block:
            raise self._fail(f"has rows of {shape[-1:]} elements, and {kind.name} packs {block} together", name)
        return kind.name, count // block * width

    def _check_apart(self, alignment: int) -> None:
        end, names = 0, set()
        for tensor in sorted(self.tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.name in names:
                raise self._fail("stands twice in the header", tensor.name)
            names.add(tensor.name)
            if tensor.start < end:
                raise self._fail(
                    f"begins at {tensor.start}, inside the tensor before, which ends at {end}", tensor.name
                )
            end = tensor.start + tensor.nbytes
        # Some writers leave out the last padding, none writes a part of it.
        if end < self._size < _padded(end, alignment):
            raise self._fail(f"is truncated: it ends at {self._size}, within the padding of the last tensor")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def as_text(value: Any, longest: int = 200) -> str:
    """A metadata value for people to read, a list by its length."""
    return f"{len(value)} values" if isinstance(value, list | np.ndarray) else str(value)[:longest]
