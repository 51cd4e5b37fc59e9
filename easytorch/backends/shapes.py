"""`Shape`: the element type and the dimensions of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from easytorch.backends.arguments import integers, ints
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.errors import BackendError

# The memory a process can address (47 bits) holds no larger array. Far enough below 2**63 that what compilers compute
# from sizes (in bytes, widened, padded) does not overflow: XLA ends the process where it does.
MAX_BYTES = 2**47
# NumPy and torch have 64 axes, and windows over an array take two for each of its own.
MAX_RANK = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """An element type and dimensions, none of them negative; no dimensions is a scalar.

    `BackendError` for more than `MAX_RANK` axes, or more bytes than `MAX_BYTES` (axes of size 0 not counted).
    """

    dtype: DType
    dimensions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))
        dimensions = self.dimensions
        if type(dimensions) is not tuple or not all(type(size) is int for size in dimensions):
            dimensions = integers(dimensions, "the dimensions of a shape")
            object.__setattr__(self, "dimensions", dimensions)
        if len(dimensions) > MAX_RANK:
            raise BackendError(f"a shape has at most {MAX_RANK} axes, and {len(dimensions)} are given")
        nbytes = self.dtype.size
        for size in dimensions:
            if size < 0:
                raise BackendError(f"a shape has no negative dimensions, and {dimensions} has")
            nbytes *= size or 1
        if nbytes > MAX_BYTES:
            raise BackendError(f"{self} is too large: an array has at most 2**{MAX_BYTES.bit_length() - 1} bytes")

    @property
    def rank(self) -> int:
        return len(self.dimensions)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dimensions)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    def with_dtype(self, dtype: DType) -> Shape:
        return Shape(dtype, self.dimensions)

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.dimensions))}]"


def make_shape(dtype: Any, *dimensions: int | Sequence[int]) -> Shape:
    """`make_shape("float32", 2, 3)` or `make_shape("float32", (2, 3))`; `BackendError` for what no array can have."""
    return Shape(dtype_of(dtype), ints(dimensions, "the dimensions of a shape"))


def shape_of(given: Any, what: str) -> Shape:
    """The `Shape` that an argument is; `BackendError` for anything else."""
    if not isinstance(given, Shape):
        raise BackendError(f"{what} must be a Shape (see make_shape), and {given!r} was given")
    return given
