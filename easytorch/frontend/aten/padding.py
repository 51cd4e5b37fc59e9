"""Reflection and replication padding, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from easytorch.backends.graph import Op
from easytorch.frontend.arrays import scatter_along, take
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

_REFLECTION = [getattr(aten, f"reflection_pad{count}d") for count in (1, 2, 3)]
_REPLICATION = [getattr(aten, f"replication_pad{count}d") for count in (1, 2, 3)]
_REFLECTION_BACKWARD = [getattr(aten, f"reflection_pad{count}d_backward") for count in (1, 2, 3)]
_REPLICATION_BACKWARD = [getattr(aten, f"replication_pad{count}d_backward") for count in (1, 2, 3)]


def _mirrored(size: int, before: int, after: int) -> np.ndarray:
    """The places of the input, turned round at its first and last element, which are not repeated."""
    at = np.abs(np.arange(-before, size + after))
    return np.where(at >= size, 2 * (size - 1) - at, at)


def _repeated(size: int, before: int, after: int) -> np.ndarray:
    return np.clip(np.arange(-before, size + after), 0, size - 1)


def _padded(ctx: Context, x: Op, padding: Sequence[int], mirror: bool) -> Op:
    """`padding` gives before and after, the last axis first."""
    places = _mirrored if mirror else _repeated
    for number in range(len(padding) // 2):
        axis = x.shape.rank - 1 - number
        before, after = padding[2 * number : 2 * number + 2]
        if before or after:
            x = take(ctx, x, axis, places(x.shape.dimensions[axis], before, after))
    return x


def _padded_backward(ctx: Context, grad: Op, x: Op, padding: Sequence[int], mirror: bool) -> Op:
    places = _mirrored if mirror else _repeated
    result = ctx.wide(grad)
    for number in range(len(padding) // 2):
        axis = x.shape.rank - 1 - number
        size = x.shape.dimensions[axis]
        dimensions = (*result.shape.dimensions[:axis], size, *result.shape.dimensions[axis + 1 :])
        zeros = ctx.full(dimensions, 0, result.shape.dtype)
        at = places(size, padding[2 * number], padding[2 * number + 1])
        result = scatter_along(ctx, zeros, axis, at, result)
    return ctx.cast(result, x.shape.dtype)


@lowering(*(packet.default for packet in _REFLECTION))
def reflection_pad(ctx: Context, x: Op, padding: Sequence[int]) -> Op:
    return _padded(ctx, x, padding, mirror=True)


@lowering(*(packet.default for packet in _REPLICATION))
def replication_pad(ctx: Context, x: Op, padding: Sequence[int]) -> Op:
    return _padded(ctx, x, padding, mirror=False)


@lowering(*(packet.default for packet in _REFLECTION_BACKWARD))
def reflection_pad_backward(ctx: Context, grad_output: Op, x: Op, padding: Sequence[int]) -> Op:
    return _padded_backward(ctx, grad_output, x, padding, mirror=True)


@lowering(*(packet.default for packet in _REPLICATION_BACKWARD))
def replication_pad_backward(ctx: Context, grad_output: Op, x: Op, padding: Sequence[int]) -> Op:
    return _padded_backward(ctx, grad_output, x, padding, mirror=False)


@lowering(aten._pad_circular.default)
def pad_circular(ctx: Context, x: Op, pad: Sequence[int]) -> Op:
    """Circular padding; negative padding crops."""
    for number in range(len(pad) // 2):
        axis = x.shape.rank - 1 - number
        size = x.shape.dimensions[axis]
        places = np.arange(-pad[2 * number], size + pad[2 * number + 1])
        x = take(ctx, x, axis, places % max(size, 1))
    return x
