"""A computation partitioned over a mesh of devices: it is written for whole arrays, and the compiler divides it.

A sharding names for each dimension of an array the mesh axes that it is divided over: one name, a tuple of names (the
first is the major one), or None. Devices are numbered in the order of the mesh, the last axis fastest (GoMLX's
`DistributedAutoSharding`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easytorch.backends.errors import BackendError
from easytorch.backends.shapes import Shape

Sharding = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Mesh:
    """Axes by name, in order, and their sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, axes: Mapping[str, int]) -> Mesh:
        """The mesh of a mapping from names to sizes; `BackendError` where one is no identifier or no size."""
        if not axes:
            raise BackendError("a mesh needs at least one axis, as in {'fsdp': 4}")
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
                raise BackendError(f"a mesh axis is called by an identifier, not {name!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise BackendError(f"the mesh axis {name} has {size!r} devices; give 1 or more")
        return cls(tuple(axes), tuple(axes.values()))

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def along(self, axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        """The names in one dimension's entry of a sharding."""
        return (axes,) if isinstance(axes, str) else axes or ()

    def parts(self, axes: str | tuple[str, ...] | None) -> int:
        """Over how many parts such an entry divides a dimension."""
        return math.prod(self.sizes[self.names.index(name)] for name in self.along(axes))


def check_sharding(sharding: Any, shape: Shape, mesh: Mesh, what: str) -> Sharding:
    """`sharding` with None for the dimensions it leaves out; None is a replicated array.

    `BackendError` for an unknown axis, one that is named twice, too many dimensions, or one that does not divide.
    """
    given = () if sharding is None else sharding
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > shape.rank:
        raise BackendError(f"{what}: a sharding of {shape} is a tuple of at most {shape.rank} entries, not {given!r}")
    found: list[str | tuple[str, ...] | None] = [
        tuple(entry) if isinstance(entry, list | tuple) else entry for entry in given
    ]
    found += [None] * (shape.rank - len(found))
    seen: set[str] = set()
    for dimension, (size, entry) in enumerate(zip(shape.dimensions, found, strict=True)):
        for name in mesh.along(entry):
            if name not in mesh.names:
                raise BackendError(f"{what}: the mesh has no axis {name!r}; its axes are {', '.join(mesh.names)}")
            if name in seen:
                raise BackendError(f"{what}: {tuple(given)} names {name} twice: an axis divides one dimension")
            seen.add(name)
        if size % mesh.parts(entry):
            raise BackendError(
                f"{what}: dimension {dimension} of {shape}, {size}, does not divide over the {mesh.parts(entry)} "
                f"devices of {' x '.join(mesh.along(entry))}"
            )
    return tuple(found)


def shard_shape(shape: Shape, sharding: Sharding, mesh: Mesh) -> Shape:
    """The shape of each device's part."""
    sizes = (size // mesh.parts(entry) for size, entry in zip(shape.dimensions, sharding, strict=True))
    return Shape(shape.dtype, tuple(sizes))


def shard_slices(dimensions: Sequence[int], sharding: Sharding, mesh: Mesh) -> list[tuple[slice, ...]]:
    """The part of an array that each device has, device by device."""
    found = []
    for place in itertools.product(*map(range, mesh.sizes)):
        slices = []
        for size, entry in zip(dimensions, sharding, strict=True):
            index, parts = 0, 1
            for name in mesh.along(entry):
                axis = mesh.names.index(name)
                index, parts = index * mesh.sizes[axis] + place[axis], parts * mesh.sizes[axis]
            step = size // parts
            slices.append(slice(index * step, (index + 1) * step))
        found.append(tuple(slices))
    return found
