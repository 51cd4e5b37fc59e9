"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable

from easytorch.backends.dtypes import SIGNED, DType, highest, lowest
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType
from easytorch.backends.xla.emitter import Emitter, Value, int_array
from easytorch.backends.xla.narrow import narrow, widen
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.conversion import convert

Ints = tuple[int, ...]


# The operation that combines two elements, and the initial value.
COMBINERS: dict[ReduceOpType, tuple[str, Callable[[DType], float]]] = {
    ReduceOpType.SUM: ("add", lambda dtype: 0),
    ReduceOpType.PRODUCT: ("multiply", lambda dtype: 1),
    ReduceOpType.MAX: ("maximum", lowest),
    ReduceOpType.MIN: ("minimum", highest),
}


def _reduce(name: str, start: Callable[[DType], float]) -> Callable[..., Value]:
    def emit(e: Emitter, x: Value, axes: Ints) -> Value:
        # Starts from the narrow type's own extreme: it may have no infinity, and an empty reduction returns the
        # extreme.
        result = e.reduce(name, widen(e, x, least=4), start(x.dtype), axes or tuple(range(x.rank)))
        return narrow(e, result, x.dtype)

    return emit


def _arg_min_max(e: Emitter, x: Value, axis: int, output_dtype: DType, is_min: bool) -> Value:
    x = widen(e, x)
    counter = DType.INT32 if x.dimensions[axis] < 2**31 else DType.INT64
    places = e.iota(x.shape.with_dtype(counter), axis)
    direction = "LT" if is_min else "GT"

    def earlier(best: Value, place: Value, other: Value, other_place: Value) -> list[Value]:
        better = e.compare(direction, best, other)
        same = e.compare("EQ", best, other)
        if x.dtype.is_float:
            better = e.binary("or", better, e.compare("NE", best, best))
            both = e.binary("and", e.compare("NE", best, best), e.compare("NE", other, other))
            same = e.binary("or", same, both)
            better = e.binary("and", better, e.unary("not", both))
        first = e.binary("and", same, e.compare("LT", place, other_place))
        keep = e.binary("or", better, first)
        return [e.select(keep, best, other), e.select(keep, place, other_place)]

    scalars = [Shape(x.dtype), Shape(counter)]
    region = e.region([*scalars, *scalars], earlier)
    start = highest(x.dtype) if is_min else lowest(x.dtype)
    # Starts with an index after all others, so that among elements equal to the initial value the first is chosen.
    operands = (x, places, e.scalar(start, x.dtype), e.scalar(2**31 - 1, counter))
    kept = (*x.dimensions[:axis], *x.dimensions[axis + 1 :])
    shapes = (Shape(x.dtype, kept), Shape(counter, kept))
    _, found = e.ops("reduce", operands, shapes, f"dimensions = {int_array((axis,))}", region)
    return convert(e, found, output_dtype)


def _bits(number: int) -> Callable[[DType], float]:
    """The initial bits: none set, or all."""
    return lambda dtype: 0 if not number else (1 if dtype is DType.BOOL else -1 if dtype in SIGNED else highest(dtype))


_AND = ("and", _bits(1))
_OR = ("or", _bits(0))
_XOR = ("xor", _bits(0))

EMITTERS: dict[OpType, Emit] = {
    OpType.REDUCE_SUM: _reduce(*COMBINERS[ReduceOpType.SUM]),
    OpType.REDUCE_PRODUCT: _reduce(*COMBINERS[ReduceOpType.PRODUCT]),
    OpType.REDUCE_MAX: _reduce(*COMBINERS[ReduceOpType.MAX]),
    OpType.REDUCE_MIN: _reduce(*COMBINERS[ReduceOpType.MIN]),
    OpType.REDUCE_BITWISE_AND: _reduce(*_AND),
    OpType.REDUCE_BITWISE_OR: _reduce(*_OR),
    OpType.REDUCE_BITWISE_XOR: _reduce(*_XOR),
    OpType.REDUCE_LOGICAL_AND: _reduce(*_AND),
    OpType.REDUCE_LOGICAL_OR: _reduce(*_OR),
    OpType.REDUCE_LOGICAL_XOR: _reduce(*_XOR),
    OpType.ARG_MIN_MAX: _arg_min_max,
}
