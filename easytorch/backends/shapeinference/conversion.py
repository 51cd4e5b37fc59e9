"""Conversions to another element type, by value and by bits."""

from __future__ import annotations

from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


def _convert(x: Shape, dtype: DType) -> Shape:
    return x.with_dtype(dtype)


def _bitcast(x: Shape, target_dtype: DType) -> Shape:
    here, there = (1 if dtype is DType.BOOL else dtype.bits for dtype in (x.dtype, target_dtype))
    if here == there:
        return x.with_dtype(target_dtype)
    if here > there:
        return Shape(target_dtype, (*x.dimensions, here // there))
    if not x.rank or x.dimensions[-1] != there // here:
        raise BackendError(f"the last axis must have {there // here} elements of {x.dtype} for one of {target_dtype}")
    return Shape(target_dtype, x.dimensions[:-1])


RULES: dict[OpType, Rule] = {
    OpType.CONVERT_DTYPE: _convert,
    OpType.BITCAST: _bitcast,
}
