"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Collection

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

INTEGERS = (*SIGNED, *UNSIGNED)
_NUMBERS = (*INTEGERS, *FLOATS, *COMPLEX)
ORDERED = (*INTEGERS, *FLOATS, DType.BOOL)
# The types that some reduction accepts; `reducible` checks the one asked for.
REDUCIBLE = (*_NUMBERS, DType.BOOL)


def _reduce(allowed: Collection[DType], what: str) -> Rule:
    @takes(allowed, what)
    def rule(x: Shape, axes: tuple[int, ...]) -> Shape:
        if len(set(axes)) != len(axes):
            raise BackendError(f"axes {axes} name an axis twice")
        for axis in axes:
            require_axis(x, axis)
        gone = axes or range(x.rank)
        return Shape(x.dtype, tuple(size for axis, size in enumerate(x.dimensions) if axis not in gone))

    return rule


@takes(ORDERED, "integers, floats and bool")
def _arg_min_max(x: Shape, axis: int, output_dtype: DType, is_min: bool) -> Shape:
    require_axis(x, axis)
    require_dtype(Shape(output_dtype), INTEGERS, "indices are integers")
    if not x.dimensions[axis]:
        raise BackendError(f"axis {axis} is empty, so it has no minimum or maximum")
    return Shape(output_dtype, (*x.dimensions[:axis], *x.dimensions[axis + 1 :]))


def reducible(x: Shape, reduction_type: ReduceOpType) -> None:
    """`BackendError` unless the reduction takes elements of `x`."""
    if reduction_type is ReduceOpType.UNDEFINED:
        raise BackendError("the reduction is UNDEFINED; choose SUM, PRODUCT, MAX or MIN")
    ordered = reduction_type in (ReduceOpType.MAX, ReduceOpType.MIN)
    if ordered:
        require_dtype(x, ORDERED, "integers, floats and bool are ordered")
    else:
        require_dtype(x, _NUMBERS, "integers, floats and complex numbers are added and multiplied")


_BITS = _reduce((*INTEGERS, DType.BOOL), "integers and bool")
_LOGICAL = _reduce((DType.BOOL,), "bool")
_EXTREME = _reduce(ORDERED, "integers, floats and bool")
_ARITHMETIC = _reduce(_NUMBERS, "integers, floats and complex numbers")

RULES: dict[OpType, Rule] = {
    **dict.fromkeys((OpType.REDUCE_BITWISE_AND, OpType.REDUCE_BITWISE_OR, OpType.REDUCE_BITWISE_XOR), _BITS),
    **dict.fromkeys((OpType.REDUCE_LOGICAL_AND, OpType.REDUCE_LOGICAL_OR, OpType.REDUCE_LOGICAL_XOR), _LOGICAL),
    **dict.fromkeys((OpType.REDUCE_MAX, OpType.REDUCE_MIN), _EXTREME),
    **dict.fromkeys((OpType.REDUCE_SUM, OpType.REDUCE_PRODUCT), _ARITHMETIC),
    OpType.ARG_MIN_MAX: _arg_min_max,
}
