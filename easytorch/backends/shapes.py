"""`Shape`: the element type and the dimensions of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.errors import BackendError


@dataclass(frozen=True, slots=True)
class Shape:
    """An element type and dimensions, none of them negative; no dimensions is a scalar."""

    dtype: DType
    dimensions: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """How many axes."""
        return len(self.dimensions)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.dimensions)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.size

    def with_dtype(self, dtype: DType) -> Shape:
        """The same dimensions of another type."""
        return Shape(dtype, self.dimensions)

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.dimensions))}]"


def make_shape(dtype: Any, *dimensions: int | Sequence[int]) -> Shape:
    """`make_shape("float32", 2, 3)` or `make_shape("float32", (2, 3))`; `BackendError` for a negative dimension."""
    sizes = ints(dimensions)
    if any(size < 0 for size in sizes):
        raise BackendError(f"a shape has no negative dimensions, and {sizes} has")
    return Shape(dtype_of(dtype), sizes)


def ints(values: Sequence[Any]) -> tuple[int, ...]:
    """Integers given one by one or as one sequence: what stands for Go's `...int`."""
    if len(values) == 1 and not hasattr(values[0], "__index__"):
        values = tuple(values[0])
    try:
        return tuple(int(value.__index__()) for value in values)
    except (AttributeError, TypeError):
        raise BackendError(f"{values!r} are not all integers") from None
