"""Sorting: by torch's own sort where the comparator is a plain less or greater, else by merging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Kernel
from easytorch.backends.aten.ops.elementwise import ELEMENTWISE, ordinals_of
from easytorch.backends.aten.storage_dtypes import swapped, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Graph
from easytorch.backends.types import OpType

# Operations that apply elementwise to tensors; scalars are broadcast.
_POINTWISE = frozenset(ELEMENTWISE) - {OpType.BITCAST} | {OpType.PARAMETER, OpType.CONSTANT}
_DESCENDS = {
    OpType.LESS_THAN: False,
    OpType.LESS_THAN_TOTAL_ORDER: False,
    OpType.GREATER_THAN: True,
    OpType.GREATER_THAN_TOTAL_ORDER: True,
}
# (lines, n) indices of left and right elements -> whether the left comes first.
Before = Callable[[Tensor, Tensor], Tensor]


def is_pointwise(comparator: Graph) -> bool:
    """Whether the comparator applies elementwise to tensors."""
    return all(node.op_type in _POINTWISE for node in comparator.nodes)


def bind_sort(comparator: Graph, compare: Kernel, count: int, axis: int, *, traced: bool) -> Kernel:
    """The function of `count` operands and the comparator's captures. compare: the comparator's own function."""
    merges = _by_merges(compare if is_pointwise(comparator) else _one_by_one(compare), count, axis)
    found = _plain_order(comparator)
    if found is None:
        return merges
    number, key, descends, may_be_nan = found
    if may_be_nan and traced:
        return merges

    def plain(*operands: Tensor) -> tuple[Tensor, ...]:
        keys = key(operands[number])
        if may_be_nan and keys.isnan().any():
            return merges(*operands)  # type: ignore[no-any-return]
        order = torch.sort(keys, dim=axis, descending=descends, stable=True).indices
        return tuple(torch.take_along_dim(operand, order, axis) for operand in operands[:count])

    return plain


def _by_merges(before_of: Kernel, count: int, axis: int) -> Kernel:
    def sort(*operands: Tensor) -> tuple[Tensor, ...]:
        captures = operands[count:]
        lines = [operand.movedim(axis, -1) for operand in operands[:count]]
        if not lines[0].numel():
            return tuple(operands[:count])
        flat = [line.reshape(-1, line.shape[-1]) for line in lines]

        def before(one: Tensor, other: Tensor) -> Tensor:
            pairs = [line.gather(1, indices) for line in flat for indices in (one, other)]
            return before_of(*pairs, *captures)[0].expand(one.shape)  # type: ignore[no-any-return]

        order = _merge_order(flat[0], before)
        return tuple(
            one.gather(1, order).reshape(line.shape).movedim(-1, axis) for one, line in zip(flat, lines, strict=True)
        )

    return sort


def _plain_order(comparator: Graph) -> tuple[int, Callable[[Tensor], Tensor], bool, bool] | None:
    """The operand that is compared alone, its keys, whether they descend, and whether NaNs, of which `<` makes no
    order, would have to be left to the merges; None for other comparators."""
    (output,) = comparator.outputs
    node = output.node
    descends = _DESCENDS.get(node.op_type)
    if descends is None or any(op.node.op_type is not OpType.PARAMETER for op in node.inputs):
        return None
    first, second = (op.node.attributes["index"] for op in node.inputs)
    compared = len(comparator.parameters) - len(comparator.captures)
    if first // 2 != second // 2 or first == second or max(first, second) >= compared:
        return None
    dtype = node.inputs[0].shape.dtype
    total = node.op_type in (OpType.LESS_THAN_TOTAL_ORDER, OpType.GREATER_THAN_TOTAL_ORDER)
    return first // 2, _keys(dtype, total=total), descends != (first > second), dtype.is_float and not total


def _keys(dtype: DType, *, total: bool) -> Callable[[Tensor], Tensor]:
    if total:
        return ordinals_of(dtype)
    swap = swapped(dtype)
    return lambda x: swap(wide(x, dtype))


def _one_by_one(compare: Kernel) -> Kernel:
    """A comparator of scalars for tensors."""

    def compared(*operands: Tensor) -> tuple[Tensor, ...]:
        shape = operands[0].shape
        pairs = [operand.reshape(-1) if operand.shape == shape else operand for operand in operands]
        results = [compare(*(one[place] if one.ndim else one for one in pairs))[0] for place in range(shape.numel())]
        return (torch.stack(results).reshape(shape),)

    return compared


def _merge_order(like: Tensor, before: Before) -> Tensor:
    """The stable order of each line of `like` (lines, n): runs are merged, whose elements find their places in the run
    beside their own by bisection, all at once; O(log(n)^2) calls of `before`."""
    lines, count = like.shape
    place = torch.arange(count, device=like.device)
    order = place.expand(lines, count)
    width = 1
    while width < count:
        run = place // width
        is_left = (run % 2 == 0).expand(lines, count)
        other = torch.where(is_left, run + 1, run - 1) * width
        start = other.clamp(max=count)
        low, high = start, (other + width).clamp(max=count)
        for _ in range(width.bit_length()):
            middle = (low + high) // 2
            candidate = order.gather(1, middle.clamp(max=count - 1))
            # Of equal elements those of the left run come first.
            earlier = torch.where(is_left, before(candidate, order), ~before(order, candidate))
            is_open = low < high
            low, high = (
                torch.where(is_open & earlier, middle + 1, low),
                torch.where(is_open & ~earlier, middle, high),
            )
        target = place - run * width + (low - start) + run // 2 * 2 * width
        order = torch.zeros_like(order).scatter(1, target, order)
        width *= 2
    return order
