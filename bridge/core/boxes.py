"""Boxes of arrays: parts that are read without the rest, as each rank of a mesh reads its own of a checkpoint."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from easytorch.bridge.core.in_parts import Reads

# A slice for each dimension, of which start and stop lie within it; the step is 1.
Box = tuple[slice, ...]


@runtime_checkable
class ReadsBoxes(Protocol):
    """A reader that can read a box of a tensor."""

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """`read(name)[box]`; thread-safe as `read` is."""


def read_box(reader: Reads, name: str, box: Box) -> np.ndarray:
    """A box of one tensor of `reader`, without the rest where it can give it so."""
    return reader.read_box(name, box) if isinstance(reader, ReadsBoxes) else reader.read(name)[box]


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return tuple(slice(0, size) for size in shape)
