"""Reductions of windows, and what scatters back from windows."""

from __future__ import annotations

from easytorch.backends.dtypes import COMPLEX, FLOATS, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference import elementwise
from easytorch.backends.shapeinference.reduction import INTEGERS, REDUCIBLE, reducible
from easytorch.backends.shapeinference.rule import Rule, require_same_dtype, takes
from easytorch.backends.shapes import MAX_BYTES, Shape
from easytorch.backends.types import OpType, ReduceOpType

# What a reduction's closure may contain; integer powers are left out, as they are a loop on some backends.
_IN_CLOSURES = {
    *(elementwise.RULES.keys() - {OpType.POW}),
    OpType.CONVERT_DTYPE,
    OpType.GELU,
    OpType.PARAMETER,
    OpType.CONSTANT,
}


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


@takes((*INTEGERS, *FLOATS), "integers and floats")
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


@takes((*INTEGERS, *FLOATS, DType.BOOL, *COMPLEX), "any")
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


RULES: dict[OpType, Rule] = {
    OpType.REDUCE_WINDOW: _reduce_window,
    **dict.fromkeys(
        (OpType.SELECT_AND_SCATTER_MAX, OpType.SELECT_AND_SCATTER_MIN, OpType.SELECT_AND_SCATTER_SUM),
        _select_and_scatter,
    ),
    OpType.SELECT_AND_SCATTER: _select_and_scatter_by,
}
