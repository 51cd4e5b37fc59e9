"""Arrays that can be written without being assembled in memory: several parts in order, cast as they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from easytorch.bridge.core.blocks import contiguous
from easytorch.bridge.core.casting import cast, cast_into
from easytorch.bridge.core.mapped import Unread, give_back


@dataclass(frozen=True)
class InParts:
    """The elements of `parts`, each in C order and one after the other, cast to `dtype` as `core.casting` does.

    Parts that are only cast need not have been read yet.
    """

    parts: tuple[np.ndarray | Unread, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, array: np.ndarray | Unread) -> InParts:
        return cls((array,), array.shape, array.dtype)

    @classmethod
    def joined(cls, parts: Sequence[np.ndarray | Unread], shape: tuple[int, ...]) -> InParts:
        """Arrays of one dtype that together make one of `shape`."""
        assert sum(part.size for part in parts) == math.prod(shape), f"{len(parts)} parts do not fill {shape}"
        return cls(tuple(parts), shape, parts[0].dtype)

    @property
    def stored(self) -> np.dtype:
        """The dtype of the parts."""
        return self.parts[0].dtype

    def cast(self, dtype: np.dtype) -> InParts:
        """The same in `dtype`; what is cast already is assembled first, since rounding twice differs from once."""
        if dtype == self.dtype:
            return self
        parts = self.parts if self.dtype == self.stored else (self.whole(),)
        return InParts(parts, self.shape, dtype)

    def whole(self) -> np.ndarray:
        """The array: a view where it is one part of that dtype."""
        if len(self.parts) == 1:
            array = _read(self.parts[0]).reshape(self.shape)
            return cast(array, self.dtype)
        made = np.empty(sum(part.size for part in self.parts), self.dtype)
        start = 0
        for part in self.parts:
            room = made[start : start + part.size].reshape(part.shape)
            start += part.size
            if isinstance(part, Unread) and self.dtype == self.stored:
                part.read_into(room)
                continue
            array = _read(part)
            if self.dtype == self.stored:
                contiguous(array, room)
            else:
                cast_into(room, array)
            give_back(array)
        return made.reshape(self.shape)


def _read(part: np.ndarray | Unread) -> np.ndarray:
    return part.read() if isinstance(part, Unread) else part


@runtime_checkable
class ReadsInParts(Protocol):
    """A reader, or a writer's source, that can return tensors in parts."""

    def read_in_parts(self, name: str) -> InParts:
        """The data of one tensor; thread-safe as `read` is."""


class Reads(Protocol):
    """A reader or a writer's source."""

    def read(self, name: str) -> np.ndarray: ...


def read_in_parts(reader: Reads, name: str) -> InParts:
    """One tensor of `reader`, in parts where it can give it so."""
    return reader.read_in_parts(name) if isinstance(reader, ReadsInParts) else InParts.of(reader.read(name))
