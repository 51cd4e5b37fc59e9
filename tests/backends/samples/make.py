"""What a sample is, and the values that samples are made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.types import OpType

INTEGERS = (*SIGNED, *UNSIGNED)
NUMBERS = (*INTEGERS, *FLOATS, *COMPLEX)
# Where the type changes nothing but how elements are copied or added.
FEW = (DType.BOOL, DType.INT4, DType.INT32, DType.UINT8, DType.FLOAT8_E5M2, DType.BFLOAT16, DType.FLOAT32)


@dataclass(frozen=True, slots=True)
class Sample:
    """One use of an operation.

    build: (builder, *parameters) -> op or ops. jax: the same of arrays of the wide types, in jax. host: the same of the
    inputs themselves, in NumPy or plain Python. At least one of the two says what the result is, independently.
    exact: the result has no rounding: it is compared bit by bit (all NaN are one). scaled: errors are relative to the
    largest element, as of sums. inputs of several devices stand one device after the other.
    """

    op_type: OpType
    name: str
    inputs: tuple[np.ndarray, ...]
    build: Callable[..., Any]
    jax: Callable[..., Any] | None = None
    host: Callable[..., Any] | None = None
    exact: bool = False
    scaled: bool = False
    num_devices: int = 1

    def __post_init__(self) -> None:
        assert self.jax or self.host, f"{self} has no reference"

    def __str__(self) -> str:
        return f"{self.op_type.go_name}/{self.name}"


def rng(*what: Any) -> np.random.Generator:
    """The same for the same names, on every machine."""
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def normal(dtype: DType, *dims: int, seed: object = 0) -> np.ndarray:
    """Values of moderate size: floats around zero, integers over the whole of the narrow types."""
    source = rng(dtype.value, dims, seed)
    if dtype is DType.BOOL:
        return source.random(dims) < 0.5
    if dtype.is_integer:
        low, high = ends(dtype)
        return source.integers(max(low, -100), min(high, 100), dims, endpoint=True).astype(dtype.numpy)
    real = source.standard_normal(dims)
    if dtype.is_complex:
        return (real + 1j * source.standard_normal(dims)).astype(dtype.numpy)
    return np.asarray(real.astype(np.float32) if dtype.size < 4 else real).astype(dtype.numpy)


def ends(dtype: DType) -> tuple[int, int]:
    """The least and the greatest integer."""
    info = ml_dtypes.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def modular(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Python's integers modulo 2**bits."""
    low, high = ends(dtype)
    wrapped = [(int(value) - low) % (high - low + 1) + low for value in values.ravel()]
    return np.array(wrapped, np.int64 if low else np.uint64).astype(dtype.numpy).reshape(values.shape)


def edges(dtype: DType) -> np.ndarray:
    """The values where definitions differ."""
    if dtype is DType.BOOL:
        return np.array([True, False])
    if dtype.is_integer:
        low, high = ends(dtype)
        values = {0, 1, 2, 3, 5, 7, low, low + 1, high, high - 1}
        values |= {-1, -2, -3, -7} if low else set()
        return np.array(sorted(values), object).astype(np.int64 if low else np.uint64).astype(dtype.numpy)
    if dtype.is_complex:
        return np.array([1 + 1j, -1 + 0.5j, 0.25 - 2j, -0.5 - 0.5j, 3 + 1e-3j, 1e-3 + 2j]).astype(dtype.numpy)
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.25, 10.0, -10.0, 100.0, -100.0, 1e-3]
    with np.errstate(all="ignore"):
        return np.array([*values, np.inf, -np.inf, np.nan], np.float32).astype(dtype.numpy)


def pairs(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Every edge with every other."""
    values = edges(dtype)
    return np.repeat(values, len(values)), np.tile(values, len(values))


def over(op_type: OpType, dtypes: Sequence[DType], make: Callable[[DType], Sample]) -> list[Sample]:
    """A sample for each of the types that the operation takes."""
    from easytorch.backends.shapeinference import accepted_dtypes

    return [make(dtype) for dtype in dtypes if dtype in accepted_dtypes(op_type)]
