"""The offsets of arrays in a msgpack file: containers are walked, arrays are located and never read.

Layout: msgpack's specification (msgpack/msgpack, spec.md). Flax adds three extension types (flax.serialization):
1 an ndarray, itself msgpack of (shape, dtype name, bytes); 2 a complex number, msgpack of (real, imaginary); 3 a numpy
scalar, encoded as 1. Every size is checked against what is left of the file before anything is made of it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.tensor_info import MAX_RANK
from easytorch.bridge.dtypes import is_dtype, numpy_dtype
from easytorch.bridge.errors import CheckpointError

if TYPE_CHECKING:
    from easytorch.bridge.core.mapped import ReadFile

# First byte -> what follows: a kind and the width of its length, a number's layout, the length of a fixed extension.
_SIZED = {
    **{0xC4 + i: ("bin", 1 << i) for i in range(3)},
    **{0xC7 + i: ("ext", 1 << i) for i in range(3)},
    **{0xD9 + i: ("str", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_NUMBERS = {0xCA + i: struct.Struct(">" + code) for i, code in enumerate("fdBHIQbhiq")}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXTENSIONS = {0xD4 + i: 1 << i for i in range(5)}

# Deeper than any parameter tree, and far from Python's own recursion limit; more leaves than any checkpoint has.
_MAX_DEPTH = 64
_MAX_LEAVES = 1 << 20


@dataclass(frozen=True)
class Located:
    """An array in the file: `start` is the offset of its first element."""

    shape: tuple[int, ...]
    dtype: str
    start: int


@dataclass(frozen=True)
class _Span:
    """`length` bytes at `start`: text, bytes, or the payload of extension `code`."""

    kind: str
    start: int
    length: int
    code: int = 0


Tree = dict[str, "Tree | Located | bool | int | float | complex | str | None"]


class Walk:
    """One pass over the file at `path`, whose bytes are `data`."""

    def __init__(self, path: Path, data: mmap.mmap | ReadFile | bytes, size: int) -> None:
        self._path = path
        self._data = data
        self._position = 0
        self._end = size
        self._leaves = 0

    def tree(self) -> Tree:
        """The nested map in the file, with every array located; a list counts as a map from "0", "1", ..."""
        tree = self._value(())
        if not isinstance(tree, dict):
            raise self._fail("does not start with a map of names, so it is not a Flax checkpoint", ())
        if self._position != self._end:
            raise self._fail(f"has {self._end - self._position} bytes after its end", ())
        return tree

    def stream(self) -> Tree:
        """The tree of a file of `(keys, value)` pairs, one after the other, each value bytes that hold an object."""
        tree: Tree = {}
        while self._position < self._end:
            if self._head(()) != ("array", 2):
                raise self._fail("is no stream of pairs of keys and a value", ())
            path = self._keys()
            node: Any = tree
            for key in path[:-1]:
                node = node.setdefault(key, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or path[-1] in node:
                raise self._fail("has the name twice", path)
            node[path[-1]] = self._inside(self._head(path), path)
        return tree

    def _keys(self) -> tuple[str, ...]:
        """The path of a stream's value as strings; list indices are integers in the file."""
        head = self._head(())
        if not isinstance(head, tuple) or head[0] != "array" or not 0 < head[1] <= _MAX_DEPTH:
            raise self._fail(f"has a value whose keys are not a list of 1 to {_MAX_DEPTH}", ())
        keys = [self._head(()) for _ in range(head[1])]
        named = [self._text(key, ()) if isinstance(key, _Span) and key.kind == "str" else key for key in keys]
        if not all(type(key) in (str, int) for key in named):
            raise self._fail("has a key that is neither a name nor a number", ())
        return tuple(str(key) for key in named)

    def _inside(self, span: object, path: tuple[str, ...]) -> Any:
        """The object that the bytes of a value hold; msgpack before 1.0 called bytes text."""
        if not isinstance(span, _Span) or span.kind == "ext":
            raise self._fail("is corrupt: a value is not bytes", path)
        outside = self._position, self._end
        self._position, self._end = span.start, span.start + span.length
        found = self._value(path)
        if self._position != self._end:
            raise self._fail("is corrupt: a value is shorter than its bytes", path)
        self._position, self._end = outside
        return found

    def _fail(self, message: str, path: tuple[str, ...]) -> CheckpointError:
        message = f"{message} (at byte {self._position}); download or save the file again"
        return CheckpointError(message, file=self._path, tensor="/".join(path) or None)

    def _take(self, count: int, path: tuple[str, ...]) -> int:
        left = self._end - self._position
        if count > left:
            raise self._fail(f"is truncated or corrupt: {count} bytes announced, {left} left", path)
        self._position += count
        return self._position - count

    def _unsigned(self, width: int, path: tuple[str, ...]) -> int:
        start = self._take(width, path)
        return int.from_bytes(self._data[start : start + width], "big")

    def _head(self, path: tuple[str, ...]) -> Any:
        """The next object: a plain value, a `_Span` passed over, or `("map" | "array", entries)`."""
        first = self._unsigned(1, path)
        if first <= 0x7F or first >= 0xE0:
            return first if first <= 0x7F else first - 0x100
        if first <= 0x9F:
            return ("map" if first <= 0x8F else "array", first & 0x0F)
        if first <= 0xBF:
            return _Span("str", self._take(first & 0x1F, path), first & 0x1F)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            number = _NUMBERS[first]
            start = self._take(number.size, path)
            return number.unpack(self._data[start : start + number.size])[0]
        if first in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[first], path)
        if first not in _SIZED:
            raise self._fail("is corrupt: a byte that starts no msgpack object", path)
        kind, width = _SIZED[first]
        length = self._unsigned(width, path)
        if kind == "ext":
            return self._extension(length, path)
        if kind in ("map", "array"):
            return (kind, length)
        return _Span(kind, self._take(length, path), length)

    def _extension(self, length: int, path: tuple[str, ...]) -> _Span:
        code = self._unsigned(1, path)
        return _Span("ext", self._take(length, path), length, code)

    def _value(self, path: tuple[str, ...]) -> Any:
        head = self._head(path)
        if isinstance(head, tuple):
            return self._entries(head[0], head[1], path)
        self._leaves += 1
        if self._leaves > _MAX_LEAVES:
            raise self._fail(f"has more than {_MAX_LEAVES} leaves", path)
        if not isinstance(head, _Span):
            return head
        if head.kind == "ext":
            return self._decoded(head, path)
        return self._text(head, path)

    def _entries(self, kind: str, count: int, path: tuple[str, ...]) -> Tree:
        if len(path) >= _MAX_DEPTH:
            raise self._fail(f"is nested deeper than {_MAX_DEPTH} maps", path[:4])
        tree: Tree = {}
        for number in range(count):
            key = str(number) if kind == "array" else self._key(path)
            if key in tree:
                raise self._fail("has the name twice", (*path, key))
            tree[key] = self._value((*path, key))
        return tree

    def _key(self, path: tuple[str, ...]) -> str:
        head = self._head(path)
        if isinstance(head, int) and not isinstance(head, bool):
            return str(head)
        if not isinstance(head, _Span) or head.kind == "ext":
            raise self._fail("has a map key that is not a name", path)
        return self._text(head, path)

    def _text(self, span: _Span, path: tuple[str, ...]) -> str:
        try:
            return self._data[span.start : span.start + span.length].decode()
        except UnicodeDecodeError as error:
            raise self._fail("is corrupt: a name is not UTF-8", path) from error

    def _decoded(self, span: _Span, path: tuple[str, ...]) -> Located | complex:
        if span.code not in (1, 2, 3):
            raise self._fail(f"has msgpack extension {span.code}; Flax's are 1, 2 and 3", path)
        outside = self._position, self._end
        self._position, self._end = span.start, span.start + span.length
        found = self._complex(path) if span.code == 2 else self._array(path)
        if self._position != self._end:
            raise self._fail("is corrupt: an array is shorter than its frame", path)
        self._position, self._end = outside
        return found

    def _complex(self, path: tuple[str, ...]) -> complex:
        if self._head(path) != ("array", 2):
            raise self._fail("is corrupt: a complex number is not a pair", path)
        real, imaginary = self._head(path), self._head(path)
        if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
            raise self._fail("is corrupt: a complex number is not a pair of numbers", path)
        return complex(real, imaginary)

    def _array(self, path: tuple[str, ...]) -> Located:
        if self._head(path) != ("array", 3):
            raise self._fail("is corrupt: an array is not (shape, dtype, bytes)", path)
        shape_head = self._head(path)
        if not isinstance(shape_head, tuple) or shape_head[0] != "array" or shape_head[1] > MAX_RANK:
            raise self._fail(f"is corrupt: a shape is not a list of at most {MAX_RANK} sizes", path)
        shape = tuple(self._head(path) for _ in range(shape_head[1]))
        if not all(type(size) is int and size >= 0 for size in shape):
            raise self._fail("is corrupt: a shape is not a list of sizes", path)
        name = self._head(path)
        dtype = self._text(name, path) if isinstance(name, _Span) and name.kind != "ext" else ""
        if not is_dtype(dtype):
            raise self._fail(f"has the unknown dtype {dtype!r}", path)
        data = self._head(path)
        if not isinstance(data, _Span) or data.kind == "ext":
            raise self._fail("is corrupt: an array has no bytes", path)
        count = numpy_dtype(dtype).itemsize
        for size in shape:
            count *= size
        if count != data.length:
            raise self._fail(f"is corrupt: {dtype} of shape {shape} takes {count} bytes, {data.length} are there", path)
        return Located(shape, dtype, data.start)
