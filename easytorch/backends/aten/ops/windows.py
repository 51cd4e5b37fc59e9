"""Windows over an array: their reductions, and select-and-scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.ops.movement import padder
from easytorch.backends.aten.ops.reduction import identity_of, reduced, values
from easytorch.backends.aten.storage_dtypes import swapped, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType, PadAxis, ReduceOpType


def windows(x: Tensor, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int], keep: int = 0) -> Tensor:
    """A view of x with an axis for the places along each axis, and after them one for the elements of each window.

    keep: how many leading axes have no windows of their own (sizes, strides and dilations 1 there).
    """
    for axis in range(keep, len(sizes)):
        span = (sizes[axis] - 1) * dilations[axis] + 1
        x = x.unfold(axis, span, strides[axis])[..., :: dilations[axis]]
    return x


def _reduce_window(context: NodeContext) -> Kernel:
    kind, dtype = context.attributes["reduction_type"], context.dtype
    names = ("window_dimensions", "strides", "window_dilations")
    sizes, strides, dilations = (context.attributes[name] for name in names)
    identity = identity_of(dtype, kind)
    config = [
        PadAxis(start, end, dilation - 1)
        for (start, end), dilation in zip(
            context.attributes["paddings"], context.attributes["base_dilations"], strict=True
        )
    ]
    output = context.output.dimensions
    inward, back = values(dtype, kind)
    function = reduced(dtype, kind)
    pad = padder(context.operand.dimensions, config, identity) if any(map(_changes, config)) else None
    moving = [axis for axis in range(len(sizes)) if (sizes[axis], strides[axis]) != (1, 1)]
    scan = _SCANS.get(kind) if dtype is not DType.BOOL else None
    if scan is not None and output == context.operand.dimensions and len(moving) == 1 and _is_scan(context, moving[0]):
        (along,) = moving
        return lambda x: back(scan(inward(x), along))

    def reduce(x: Tensor) -> Tensor:
        x = inward(x)
        if 0 in output:
            return back(x.new_empty(output))
        if pad is not None:
            x = pad(x, x.new_full((), identity))
        # One axis after the other: a window of k by k elements costs 2k and not k * k.
        for axis in moving:
            span = (sizes[axis] - 1) * dilations[axis] + 1
            x = function(x.unfold(axis, span, strides[axis])[..., :: dilations[axis]], (x.ndim,))
        return back(x)

    return reduce


_SCANS: dict[ReduceOpType, Callable[[Tensor, int], Tensor]] = {
    ReduceOpType.SUM: lambda x, axis: torch.cumsum(x, axis, dtype=x.dtype),
    ReduceOpType.PRODUCT: lambda x, axis: torch.cumprod(x, axis, dtype=x.dtype),
    ReduceOpType.MAX: lambda x, axis: torch.cummax(x, axis).values,
    ReduceOpType.MIN: lambda x, axis: torch.cummin(x, axis).values,
}


def _is_scan(context: NodeContext, axis: int) -> bool:
    """Whether the window of every element is all before it and itself: n of n * n elements are then enough."""
    window = context.attributes["window_dimensions"][axis]
    wanted = tuple((window - 1, 0) if other == axis else (0, 0) for other in range(context.operand.rank))
    dilations = (*context.attributes["base_dilations"], *context.attributes["window_dilations"])
    return (
        window >= context.operand.dimensions[axis] > 0
        and context.attributes["strides"][axis] == 1
        and set(dilations) == {1}
        and context.attributes["paddings"] == wanted
    )


def _changes(pad: PadAxis) -> bool:
    return pad != PadAxis()


def _select_and_scatter(better: Callable[[Tensor, Tensor], Tensor] | None) -> Binder:
    """Sums at the selected places: the first of a window, then each that the selected one is not `better` than or
    equal to; all of them if None."""

    def bind(context: NodeContext) -> Kernel:
        operand, dtype = context.operand, context.dtype
        sizes, strides = context.attributes["window_dimensions"], context.attributes["window_strides"]
        places = context.shapes[1].dimensions
        if 0 in places or not operand.size:
            return lambda x, source: torch.zeros_like(x)
        elements = _window_places(context, sizes, strides, places)
        to_sum, back = values(dtype, ReduceOpType.SUM)
        swap = swapped(dtype)

        def scatter(x: Tensor, source: Tensor) -> Tensor:
            source = to_sum(source)
            total = torch.zeros(operand.size + 1, dtype=source.dtype, device=source.device)
            if better is None:
                for element in elements:
                    total = total.index_add(0, element.reshape(-1), source.reshape(-1))
            else:
                flat = swap(wide(x, dtype)).reshape(-1)
                chosen = _selected(better, torch.cat((flat, flat[:1])), elements, operand.size)
                total = total.index_add(0, chosen.reshape(-1), source.reshape(-1))
            return back(total[:-1].reshape(operand.dimensions))

        return scatter

    return bind


def bind_select_and_scatter(
    context: NodeContext, select: Callable[..., tuple[Tensor, ...]], scatter: Callable[..., tuple[Tensor, ...]]
) -> Kernel:
    """By any functions of elements, which are functions of tensors too."""
    operand, places = context.operand, context.shapes[1].dimensions
    sizes, strides = context.attributes["window_dimensions"], context.attributes["window_strides"]
    if 0 in places or not operand.size:
        return lambda x, source, init: init.expand(operand.dimensions).clone()
    elements = _window_places(context, sizes, strides, places)

    def apply(x: Tensor, source: Tensor, init: Tensor) -> Tensor:
        flat = x.reshape(-1)
        chosen = _selected(lambda a, b: select(a, b)[0], torch.cat((flat, flat[:1])), elements, operand.size)
        total = init.expand(operand.size + 1).clone()
        for element in elements:
            # The elements at one offset of all windows are different ones: but for padding, which has a place behind.
            there = total[element]
            written = torch.where(chosen == element, scatter(there, source)[0], there)
            total = total.index_copy(0, element.reshape(-1), written.reshape(-1))
        return total[:-1].reshape(operand.dimensions)

    return apply


def _window_places(
    context: NodeContext, sizes: Sequence[int], strides: Sequence[int], places: Sequence[int]
) -> list[Tensor]:
    """The flat int64 index of each element of each window, one tensor per element; padding has index `operand.size`."""
    operand = context.operand
    config = [PadAxis(start, end) for start, end in context.attributes["paddings"]]
    numbers = torch.arange(operand.size, dtype=torch.int64, device=context.device).reshape(operand.dimensions)
    numbers = padder(operand.dimensions, config)(numbers, torch.full_like(numbers[(0,) * operand.rank], operand.size))
    seen = windows(numbers, sizes, strides, (1,) * operand.rank).reshape(*places, math.prod(sizes))
    return [one.contiguous() for one in seen.unbind(-1)]


def _selected(
    better: Callable[[Tensor, Tensor], Tensor], flat: Tensor, elements: Sequence[Tensor], outside: int
) -> Tensor:
    """The selected place of each window; `outside` where a window is all padding."""
    chosen = elements[0]
    for element in elements[1:]:
        stays = (chosen != outside) & better(flat[chosen], flat[element])
        chosen = torch.where((element == outside) | stays, chosen, element)
    return chosen


WINDOWS: dict[OpType, Binder] = {
    OpType.REDUCE_WINDOW: _reduce_window,
    OpType.SELECT_AND_SCATTER_MAX: _select_and_scatter(torch.ge),
    OpType.SELECT_AND_SCATTER_MIN: _select_and_scatter(torch.le),
    OpType.SELECT_AND_SCATTER_SUM: _select_and_scatter(None),
}
