"""Reductions, windows, and batch normalization."""

from __future__ import annotations

from collections.abc import Collection

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference import elementwise
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, require_same_dtype, takes
from easytorch.backends.shapes import MAX_BYTES, Shape
from easytorch.backends.types import OpType, ReduceOpType

_INTEGERS = (*SIGNED, *UNSIGNED)
_NUMBERS = (*_INTEGERS, *FLOATS, *COMPLEX)
_ORDERED = (*_INTEGERS, *FLOATS, DType.BOOL)
# The types that some reduction accepts; `reducible` checks the one asked for.
REDUCIBLE = (*_NUMBERS, DType.BOOL)
# What a reduction's closure may contain; integer powers are left out, as they are a loop on some backends.
_IN_CLOSURES = frozenset(elementwise.RULES) - {OpType.POW, OpType.BITCAST} | {OpType.PARAMETER, OpType.CONSTANT}


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


@takes(_ORDERED, "integers, floats and bool")
def _arg_min_max(x: Shape, axis: int, output_dtype: DType, is_min: bool) -> Shape:
    require_axis(x, axis)
    require_dtype(Shape(output_dtype), _INTEGERS, "indices are integers")
    if not x.dimensions[axis]:
        raise BackendError(f"axis {axis} is empty, so it has no minimum or maximum")
    return Shape(output_dtype, (*x.dimensions[:axis], *x.dimensions[axis + 1 :]))


def window_sizes(
    dimensions: tuple[int, ...],
    window: tuple[int, ...],
    strides: tuple[int, ...],
    base_dilations: tuple[int, ...],
    window_dilations: tuple[int, ...],
    paddings: tuple[tuple[int, ...], ...],
) -> tuple[int, ...]:
    """How many windows fit along each axis; `BackendError` for settings that are not one per axis, or not positive."""
    rank = len(dimensions)
    positive = {
        "window_dimensions": window,
        "strides": strides,
        "base_dilations": base_dilations,
        "window_dilations": window_dilations,
    }
    for name, values in (*positive.items(), ("paddings", paddings)):
        if len(values) != rank:
            raise BackendError(f"{name} has {len(values)} entries, one for each of {rank} axes is needed")
    for name, sizes in positive.items():
        if any(size < 1 for size in sizes):
            raise BackendError(f"{name} {sizes} must all be 1 or more")
    if any(len(pair) != 2 for pair in paddings):
        raise BackendError(f"paddings {paddings} must be pairs, before and after each axis")
    for name, given in (*positive.items(), ("paddings", [end for pair in paddings for end in pair])):
        if any(abs(number) > MAX_BYTES for number in given):
            raise BackendError(f"{name} {given} has a number beyond the largest size, {MAX_BYTES}")
    counts = []
    for axis, size in enumerate(dimensions):
        base = max((size - 1) * base_dilations[axis] + 1, 0) if size else 0
        padded = base + sum(paddings[axis])
        if padded < 0:
            raise BackendError(f"axis {axis} of size {size}: the padding {paddings[axis]} crops more than that")
        span = (window[axis] - 1) * window_dilations[axis] + 1
        if max(base, padded, span) > MAX_BYTES:
            raise BackendError(f"axis {axis} of size {size} with its padding or its window is beyond the largest size")
        counts.append(0 if padded < span else (padded - span) // strides[axis] + 1)
    return tuple(counts)


@takes(REDUCIBLE, "integers, floats, complex numbers and bool")
def _reduce_window(
    x: Shape,
    reduction_type: ReduceOpType,
    window_dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    base_dilations: tuple[int, ...],
    window_dilations: tuple[int, ...],
    paddings: tuple[tuple[int, ...], ...],
) -> Shape:
    reducible(x, reduction_type)
    settings = (window_dimensions, strides, base_dilations, window_dilations, paddings)
    return Shape(x.dtype, window_sizes(x.dimensions, *settings))


def reducible(x: Shape, reduction_type: ReduceOpType) -> None:
    """`BackendError` unless the reduction takes elements of `x`."""
    if reduction_type is ReduceOpType.UNDEFINED:
        raise BackendError("the reduction is UNDEFINED; choose SUM, PRODUCT, MAX or MIN")
    ordered = reduction_type in (ReduceOpType.MAX, ReduceOpType.MIN)
    if ordered:
        require_dtype(x, _ORDERED, "integers, floats and bool are ordered")
    else:
        require_dtype(x, _NUMBERS, "integers, floats and complex numbers are added and multiplied")


@takes((*_INTEGERS, *FLOATS), "integers and floats")
def _select_and_scatter(
    operand: Shape,
    source: Shape,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    paddings: tuple[tuple[int, ...], ...],
) -> Shape:
    require_same_dtype(operand, source)
    ones = (1,) * operand.rank
    sizes = window_sizes(operand.dimensions, window_dimensions, window_strides, ones, ones, paddings)
    if source.dimensions != sizes:
        raise BackendError(f"the source must have one element for each of {sizes} windows")
    return operand


@takes((*_INTEGERS, *FLOATS, DType.BOOL, *COMPLEX), "any")
def _select_and_scatter_by(
    operand: Shape,
    source: Shape,
    init_value: Shape,
    select: Graph,
    scatter: Graph,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    paddings: tuple[tuple[int, ...], ...],
) -> Shape:
    require_same_dtype(operand, source, init_value)
    scalar = Shape(operand.dtype)
    if init_value.rank:
        raise BackendError("the initial value must be a scalar")
    for name, graph, wanted in (("select", select, scalar.with_dtype(DType.BOOL)), ("scatter", scatter, scalar)):
        if graph.output_shapes != (wanted,):
            raise BackendError(f"the closure {name} must return one {wanted}, got {graph.output_shapes}")
        if graph.captures or any(node.op_type not in _IN_CLOSURES for node in graph.nodes):
            raise BackendError(f"the closure {name} must only use operations on its own two arguments, and constants")
        if any(shape.rank for node in graph.nodes for shape in node.shapes):
            raise BackendError(f"the closure {name} must use scalars only")
    ones = (1,) * operand.rank
    sizes = window_sizes(operand.dimensions, window_dimensions, window_strides, ones, ones, paddings)
    if source.dimensions != sizes:
        raise BackendError(f"the source must have one element for each of {sizes} windows")
    return operand


@takes(FLOATS, "floats")
def _batch_norm_inference(
    operand: Shape, scale: Shape, offset: Shape, mean: Shape, variance: Shape, epsilon: float, axis: int
) -> Shape:
    _features(operand, axis, scale, offset, mean, variance)
    return operand


@takes(FLOATS, "floats")
def _batch_norm_training(operand: Shape, scale: Shape, offset: Shape, epsilon: float, axis: int) -> tuple[Shape, ...]:
    _features(operand, axis, scale, offset)
    return operand, scale, scale


@takes(FLOATS, "floats")
def _batch_norm_gradient(
    operand: Shape, scale: Shape, mean: Shape, variance: Shape, grad_output: Shape, epsilon: float, axis: int
) -> tuple[Shape, ...]:
    _features(operand, axis, scale, mean, variance)
    if grad_output != operand:
        raise BackendError(f"grad_output is {grad_output}; it must have the operand's shape, {operand}")
    return operand, scale, scale


def _features(operand: Shape, axis: int, *vectors: Shape) -> None:
    require_axis(operand, axis)
    wanted = Shape(operand.dtype, (operand.dimensions[axis],))
    for vector in vectors:
        if vector != wanted:
            raise BackendError(f"scale, offset, mean and variance must be {wanted}, and one is {vector}")


_BITS = _reduce((*_INTEGERS, DType.BOOL), "integers and bool")
_LOGICAL = _reduce((DType.BOOL,), "bool")
_EXTREME = _reduce(_ORDERED, "integers, floats and bool")
_ARITHMETIC = _reduce(_NUMBERS, "integers, floats and complex numbers")

RULES: dict[OpType, Rule] = {
    **dict.fromkeys((OpType.REDUCE_BITWISE_AND, OpType.REDUCE_BITWISE_OR, OpType.REDUCE_BITWISE_XOR), _BITS),
    **dict.fromkeys((OpType.REDUCE_LOGICAL_AND, OpType.REDUCE_LOGICAL_OR, OpType.REDUCE_LOGICAL_XOR), _LOGICAL),
    **dict.fromkeys((OpType.REDUCE_MAX, OpType.REDUCE_MIN), _EXTREME),
    **dict.fromkeys((OpType.REDUCE_SUM, OpType.REDUCE_PRODUCT), _ARITHMETIC),
    OpType.ARG_MIN_MAX: _arg_min_max,
    OpType.REDUCE_WINDOW: _reduce_window,
    **dict.fromkeys(
        (OpType.SELECT_AND_SCATTER_MAX, OpType.SELECT_AND_SCATTER_MIN, OpType.SELECT_AND_SCATTER_SUM),
        _select_and_scatter,
    ),
    OpType.SELECT_AND_SCATTER: _select_and_scatter_by,
    OpType.BATCH_NORM_FOR_INFERENCE: _batch_norm_inference,
    OpType.BATCH_NORM_FOR_TRAINING: _batch_norm_training,
    OpType.BATCH_NORM_GRADIENT: _batch_norm_gradient,
}
