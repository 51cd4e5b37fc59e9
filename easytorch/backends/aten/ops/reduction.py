"""Reductions over axes. The reduced axes, and whether they are empty, are known before they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.ops.conversion import converter
from easytorch.backends.aten.storage_dtypes import highest, is_float8, lowest, narrow, swapped, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType, ReduceOpType

Reduction = Callable[[Tensor, Sequence[int]], Tensor]


def _over(context: NodeContext) -> tuple[int, ...]:
    """The reduced axes: all if none is given."""
    return tuple(context.attributes["axes"]) or tuple(range(context.operand.rank))


def reduced(dtype: DType, kind: ReduceOpType) -> Reduction:
    """The function that reduces a tensor of values (see `values`) over axes."""
    if kind is ReduceOpType.SUM:
        return _sum
    if kind is ReduceOpType.PRODUCT:
        return _product
    identity = identity_of(dtype, kind)
    function = torch.amax if kind is ReduceOpType.MAX else torch.amin

    def extreme(x: Tensor, axes: Sequence[int]) -> Tensor:
        if not axes:
            return x
        if any(x.shape[axis] == 0 for axis in axes):
            kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
            return x.new_full(kept, identity)
        return function(_distinct(x, axes), tuple(axes))

    return extreme


def identity_of(dtype: DType, kind: ReduceOpType) -> int | float:
    """The element that a reduction starts from: 0, 1, or the least or greatest of the dtype."""
    if kind in (ReduceOpType.SUM, ReduceOpType.PRODUCT):
        return int(kind is ReduceOpType.PRODUCT)
    return lowest(dtype) if kind is ReduceOpType.MAX else highest(dtype)


def values(dtype: DType, kind: ReduceOpType) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """From elements as stored to the values that are reduced (narrow floats in float32), and back."""
    if dtype.is_float and dtype.size < 4:
        return (lambda x: wide(x, dtype)), (lambda x: narrow(x, dtype))
    if kind in (ReduceOpType.MAX, ReduceOpType.MIN):
        swap = swapped(dtype)
        return swap, swap
    return (lambda x: x), (lambda x: x)


def _sum(x: Tensor, axes: Sequence[int]) -> Tensor:
    return torch.sum(x, tuple(axes), dtype=x.dtype) if axes else x


def _product(x: Tensor, axes: Sequence[int]) -> Tensor:
    if not axes:
        return x
    if len(axes) == 1:
        return torch.prod(x, axes[0], dtype=x.dtype)
    return torch.prod(_flattened(x, axes), -1, dtype=x.dtype)


def _distinct(x: Tensor, axes: Sequence[int]) -> Tensor:
    """One element of each of `axes` that an expanded view repeats: a broadcast of 2**45 takes hours to look through."""
    for axis in axes:
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _flattened(x: Tensor, axes: Sequence[int]) -> Tensor:
    """x with `axes` as one at the end."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    shape = [x.shape[axis] for axis in kept]
    return x.permute((*kept, *axes)).reshape(*shape, math.prod(x.shape[axis] for axis in axes))


def _arithmetic(kind: ReduceOpType) -> Binder:
    def bind(context: NodeContext) -> Kernel:
        axes, function = _over(context), reduced(context.dtype, kind)
        if kind is ReduceOpType.SUM and axes and context.dtype.is_float and not is_float8(context.dtype):
            # ATen sums narrow floats in float32.
            return lambda x: torch.sum(x, axes)
        inward, back = values(context.dtype, kind)
        return lambda x: back(function(inward(x), axes))

    return bind


def _extreme(kind: ReduceOpType) -> Binder:
    def bind(context: NodeContext) -> Kernel:
        axes, function = _over(context), reduced(context.dtype, kind)
        if is_float8(context.dtype):
            inward, back = values(context.dtype, kind)
        else:
            inward = back = swapped(context.dtype)
        return lambda x: back(function(inward(x), axes))

    return bind


def _bitwise(pair: Callable[[Tensor, Tensor], Tensor], identity: int, *, counted: bool = False) -> Binder:
    """Halves combined until one element is left. counted: an element counts as often as it is there."""

    def bind(context: NodeContext) -> Kernel:
        axes = _over(context)

        def reduce(x: Tensor) -> Tensor:
            x = _flattened(x if counted else _distinct(x, axes), axes)
            if x.shape[-1] == 0:
                return x.new_full(x.shape[:-1], identity)
            while (size := x.shape[-1]) > 1:
                half = size // 2
                joined = pair(x[..., :half], x[..., half : 2 * half])
                x = torch.cat((joined, x[..., 2 * half :]), -1) if size % 2 else joined
            return x.squeeze(-1)

        return reduce if axes else lambda x: x

    return bind


def _logical(function: Callable[[Tensor, int], Tensor], *, counted: bool = False) -> Binder:
    def bind(context: NodeContext) -> Kernel:
        axes = _over(context)
        return lambda x: function(_flattened(x if counted else _distinct(x, axes), axes), -1)

    return bind


def _arg_min_max(context: NodeContext) -> Kernel:
    axis, dtype = context.attributes["axis"], context.dtype
    choose = torch.argmin if context.attributes["is_min"] else torch.argmax
    swap = swapped(dtype)
    back = converter(DType.INT64, context.attributes["output_dtype"])

    def chosen(x: Tensor) -> Tensor:
        x = _distinct(x, (axis,))  # of equal elements the first
        comparable = x.to(torch.uint8) if dtype is DType.BOOL else swap(wide(x, dtype) if is_float8(dtype) else x)
        return back(choose(comparable, axis))

    return chosen


def _is_odd(x: Tensor, axis: int) -> Tensor:
    return torch.sum(x, axis) % 2 == 1


REDUCTION: dict[OpType, Binder] = {
    OpType.REDUCE_SUM: _arithmetic(ReduceOpType.SUM),
    OpType.REDUCE_PRODUCT: _arithmetic(ReduceOpType.PRODUCT),
    OpType.REDUCE_MAX: _extreme(ReduceOpType.MAX),
    OpType.REDUCE_MIN: _extreme(ReduceOpType.MIN),
    OpType.REDUCE_BITWISE_AND: _bitwise(torch.bitwise_and, -1),
    OpType.REDUCE_BITWISE_OR: _bitwise(torch.bitwise_or, 0),
    OpType.REDUCE_BITWISE_XOR: _bitwise(torch.bitwise_xor, 0, counted=True),
    OpType.REDUCE_LOGICAL_AND: _logical(torch.all),
    OpType.REDUCE_LOGICAL_OR: _logical(torch.any),
    OpType.REDUCE_LOGICAL_XOR: _logical(_is_odd, counted=True),
    OpType.ARG_MIN_MAX: _arg_min_max,
}
