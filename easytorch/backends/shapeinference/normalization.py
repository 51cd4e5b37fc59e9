"""Batch and layer normalization, softmax, attention and gelu."""

from __future__ import annotations

import itertools

from easytorch.backends.dtypes import FLOATS, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, require_same_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


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


@takes(FLOATS, "floats")
def _softmax(x: Shape, axis: int) -> Shape:
    require_axis(x, axis)
    return x


@takes(FLOATS, "floats")
def _layer_norm(x: Shape, scale: Shape, offset: Shape, axes: tuple[int, ...], epsilon: float) -> Shape:
    for axis in axes:
        require_axis(x, axis)
    if not axes or any(one >= other for one, other in itertools.pairwise(axes)):
        raise BackendError(f"axes {axes} must increase, and be at least one")
    wanted = Shape(x.dtype, tuple(x.dimensions[axis] for axis in axes))
    for parameter in (scale, offset):
        if parameter != wanted:
            raise BackendError(f"scale and offset must be {wanted}, and one is {parameter}")
    return x


@takes(FLOATS, "floats")
def _attention(
    query: Shape, key: Shape, value: Shape, mask: Shape | None = None, *, is_causal: bool, scale: float | None
) -> Shape:
    require_same_dtype(query, key, value)
    if not query.rank == key.rank == value.rank == 4:
        raise BackendError("query, key and value are (batch, heads, sequence, head size)")
    batch, heads, length, size = query.dimensions
    if key.dimensions[0] != batch or key.dimensions[3] != size or value.dimensions[:3] != key.dimensions[:3]:
        raise BackendError("batch, head size, and the keys' heads and sequence must agree")
    if scale is None and not size:
        raise BackendError("a head size of 0 has no default scale; give `scale`")
    if not key.dimensions[1] or heads % key.dimensions[1]:
        raise BackendError(f"{heads} query heads are not a multiple of {key.dimensions[1]} key heads")
    if mask is not None:
        require_dtype(mask, (DType.BOOL, query.dtype), "a mask is bool, or added and of query's type")
        full = (batch, heads, length, key.dimensions[2])
        fits = mask.rank <= 4 and all(
            one in (1, other) for one, other in zip(reversed(mask.dimensions), reversed(full), strict=False)
        )
        if not fits:
            raise BackendError(f"the mask {mask} cannot be broadcast to {full}")
    return Shape(query.dtype, (batch, heads, length, value.dimensions[3]))


RULES: dict[OpType, Rule] = {
    OpType.BATCH_NORM_FOR_INFERENCE: _batch_norm_inference,
    OpType.BATCH_NORM_FOR_TRAINING: _batch_norm_training,
    OpType.BATCH_NORM_GRADIENT: _batch_norm_gradient,
    OpType.SOFTMAX: _softmax,
    OpType.LAYER_NORM: _layer_norm,
    OpType.SCALED_DOT_PRODUCT_ATTENTION: _attention,
    OpType.GELU: takes(FLOATS, "floats")(lambda x, approximate: x),
}
