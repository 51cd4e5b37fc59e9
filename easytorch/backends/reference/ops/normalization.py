"""Batch normalization (Ioffe and Szegedy 2015), and the composite operations by their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from easytorch.backends.reference.narrow import wide, widened
from easytorch.backends.reference.ops.elementwise import erf
from easytorch.backends.reference.ops.reduction import BLOCK
from easytorch.backends.types import OpType

Array = np.ndarray


def _along(vector: Array, operand: Array, axis: int) -> Array:
    return vector.reshape(-1, *(1,) * (operand.ndim - axis - 1))


def _others(operand: Array, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(operand.ndim) if other != axis)


def _inference(
    operand: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int
) -> Array:
    factor = scale / np.sqrt(variance + operand.dtype.type(epsilon))
    centered = operand - _along(mean, operand, axis)
    return np.asarray(centered * _along(factor, operand, axis) + _along(offset, operand, axis))


def _training(operand: Array, scale: Array, offset: Array, epsilon: float, axis: int) -> tuple[Array, Array, Array]:
    others = _others(operand, axis)
    mean = _mean(operand, others)
    variance = _mean(np.square(operand - _along(mean, operand, axis)), others)
    return _inference(operand, scale, offset, mean, variance, epsilon, axis), mean, variance


def _gradient(
    operand: Array, scale: Array, mean: Array, variance: Array, grad_output: Array, epsilon: float, axis: int
) -> tuple[Array, Array, Array]:
    others = _others(operand, axis)
    inverse = 1 / np.sqrt(variance + operand.dtype.type(epsilon))
    normed = (operand - _along(mean, operand, axis)) * _along(inverse, operand, axis)
    grad_offset = grad_output.sum(others)
    grad_scale = (grad_output * normed).sum(others)
    centered = (
        grad_output
        - _along(_mean(grad_output, others), operand, axis)
        - normed * _along(_mean(grad_output * normed, others), operand, axis)
    )
    return centered * _along(scale * inverse, operand, axis), grad_scale, grad_offset


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    count = np.prod([x.shape[axis] for axis in axes], dtype=np.int64)
    return np.asarray(x.sum(axes) / x.dtype.type(count))


def _softmax(x: Array, axis: int) -> Array:
    if not x.shape[axis]:
        return x
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def _layer_norm(x: Array, scale: Array, offset: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    sizes = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    centered = x - x.mean(axes, keepdims=True)
    variance = np.square(centered).mean(axes, keepdims=True)
    normed = centered / np.sqrt(variance + x.dtype.type(epsilon))
    return np.asarray(normed * scale.reshape(sizes) + offset.reshape(sizes))


def _attention(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, is_causal: bool, scale: float | None
) -> Array:
    added = None if mask is None or mask.dtype == bool else wide(mask)
    allowed = mask if mask is not None and mask.dtype == bool else None

    def attend(query: Array, key: Array, value: Array) -> Array:
        """Computed for a block of queries of one head at a time: the scores of all would be larger than any operand."""
        batch, count, length, size = query.shape
        shared, keys = count // key.shape[1], key.shape[2]
        factor = query.dtype.type(size**-0.5 if scale is None else scale)
        result = np.empty((batch, count, length, value.shape[3]), query.dtype)
        limits = [
            None if one is None else np.broadcast_to(one, (batch, count, length, keys)) for one in (added, allowed)
        ]
        rows = max(BLOCK // max(keys, 1), 1)
        for place, head, begin in itertools.product(range(batch), range(count), range(0, length, rows)):
            at = (place, head, slice(begin, begin + rows))
            scores = query[at] @ key[place, head // shared].T * factor
            if limits[0] is not None:
                scores = scores + limits[0][at]
            if limits[1] is not None:
                scores = np.where(limits[1][at], scores, -np.inf)
            if is_causal:
                scores = np.where(np.tri(len(scores), keys, begin) > 0, scores, -np.inf)
            greatest = scores.max(1, keepdims=True, initial=-np.inf)
            powers = np.exp(scores - np.where(greatest == -np.inf, 0, greatest))
            total = powers.sum(1, keepdims=True)
            result[at] = (powers / np.where(total == 0, 1, total)).astype(query.dtype) @ value[place, head // shared]
        return result

    return widened(attend)(query, key, value)


def _gelu(x: np.ndarray, approximate: bool) -> np.ndarray:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)), x.dtype)
    return np.asarray(0.5 * x * (1 + erf(x * math.sqrt(0.5))), x.dtype)


NORMALIZATION: dict[OpType, Callable[..., Array | tuple[Array, ...]]] = {
    OpType.GELU: widened(_gelu),
    OpType.BATCH_NORM_FOR_INFERENCE: widened(_inference),
    OpType.BATCH_NORM_FOR_TRAINING: widened(_training),
    OpType.BATCH_NORM_GRADIENT: widened(_gradient),
    OpType.SOFTMAX: widened(_softmax),
    OpType.LAYER_NORM: widened(_layer_norm),
    OpType.SCALED_DOT_PRODUCT_ATTENTION: _attention,
}
