"""Batch normalization.

Composed of others: XLA's own expansion computes the variance as E[x^2] - E[x]^2, which cancels.
"""

from __future__ import annotations

from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.narrow import widened
from easytorch.backends.xla.ops import Emit


def _mean(e: Emitter, x: Value, axis: int) -> Value:
    others = tuple(other for other in range(x.rank) if other != axis)
    total = e.reduce("add", x, 0, others)
    count = x.shape.size // x.dimensions[axis] if x.dimensions[axis] else 0
    return e.binary("divide", total, e.like(total, count))


def _deviation_inverse(e: Emitter, variance: Value, epsilon: float) -> Value:
    return e.unary("rsqrt", e.binary("add", variance, e.like(variance, epsilon)))


def _spread(e: Emitter, vector: Value, x: Value, axis: int) -> Value:
    return e.broadcast(vector, x.dimensions, (axis,))


def _inference(
    e: Emitter, x: Value, scale: Value, offset: Value, mean: Value, variance: Value, epsilon: float, axis: int
) -> Value:
    centered = e.binary("subtract", x, _spread(e, mean, x, axis))
    factor = e.binary("multiply", scale, _deviation_inverse(e, variance, epsilon))
    scaled = e.binary("multiply", centered, _spread(e, factor, x, axis))
    return e.binary("add", scaled, _spread(e, offset, x, axis))


def _training(
    e: Emitter, x: Value, scale: Value, offset: Value, epsilon: float, axis: int
) -> tuple[Value, Value, Value]:
    mean = _mean(e, x, axis)
    centered = e.binary("subtract", x, _spread(e, mean, x, axis))
    variance = _mean(e, e.binary("multiply", centered, centered), axis)
    return _inference(e, x, scale, offset, mean, variance, epsilon, axis), mean, variance


def _gradient(
    e: Emitter, x: Value, scale: Value, mean: Value, variance: Value, gradient: Value, epsilon: float, axis: int
) -> tuple[Value, Value, Value]:
    others = tuple(other for other in range(x.rank) if other != axis)
    inverse = _deviation_inverse(e, variance, epsilon)
    normal = e.binary("multiply", e.binary("subtract", x, _spread(e, mean, x, axis)), _spread(e, inverse, x, axis))
    product = e.binary("multiply", gradient, normal)
    of_scale, of_offset = e.reduce("add", product, 0, others), e.reduce("add", gradient, 0, others)
    along = e.binary("multiply", normal, _spread(e, _mean(e, product, axis), x, axis))
    rest = e.binary("subtract", e.binary("subtract", gradient, _spread(e, _mean(e, gradient, axis), x, axis)), along)
    factor = e.binary("multiply", scale, inverse)
    return e.binary("multiply", rest, _spread(e, factor, x, axis)), of_scale, of_offset


EMITTERS: dict[OpType, Emit] = {
    OpType.BATCH_NORM_FOR_INFERENCE: widened(_inference, least=4),
    OpType.BATCH_NORM_FOR_TRAINING: widened(_training, least=4),
    OpType.BATCH_NORM_GRADIENT: widened(_gradient, least=4),
}
