"""Gather and scatter (https://openxla.org/stablehlo/spec#gather, #scatter): rows of a matrix taken or changed.

The last axes that every slice has whole are the columns, the axes before them are numbered through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.storage_dtypes import indices, narrow, swapped, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


@dataclass(frozen=True, slots=True)
class _Rows:
    """Slices of `sizes` of an array of `dimensions`, at index vectors for `axes`."""

    dimensions: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    vector_axis: int
    indices: Shape

    @property
    def leading(self) -> int:
        """How many axes are not columns."""
        count = len(self.dimensions)
        while count and count - 1 not in self.axes and self.sizes[count - 1] == self.dimensions[count - 1]:
            count -= 1
        return count

    @property
    def count(self) -> int:
        """How many rows there are."""
        return math.prod(self.dimensions[: self.leading])

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return math.prod(self.dimensions[self.leading :])

    @property
    def batch(self) -> tuple[int, ...]:
        """The indices' axes but that of the vectors."""
        return tuple(size for axis, size in enumerate(self.indices.dimensions) if axis != self.vector_axis)

    @property
    def steps(self) -> list[int]:
        """How many rows further the next element along each leading axis is."""
        return [math.prod(self.dimensions[axis + 1 : self.leading]) for axis in range(self.leading)]

    def offsets(self, device: torch.device) -> Tensor:
        """The rows of a slice, counted from its first."""
        offsets = torch.zeros((), dtype=torch.int64, device=device)
        for size, step in zip(self.sizes[: self.leading], self.steps, strict=True):
            offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device=device) * step
        return offsets.reshape(-1)

    def starts(self, x: Tensor) -> list[Tensor]:
        """(places,) for each of `axes`."""
        plain = indices(x, self.indices.dtype)
        if self.vector_axis == self.indices.rank:
            return [plain.reshape(-1)]
        return [one.reshape(-1) for one in plain.unbind(self.vector_axis)]

    def first(self, starts: Sequence[Tensor], like: Tensor) -> Tensor:
        """(places, 1): the first row of the slice at each place."""
        steps = self.steps
        total = torch.zeros((math.prod(self.batch),), dtype=torch.int64, device=like.device)
        for axis, start in zip(self.axes, starts, strict=True):
            total = total + start * steps[axis] if steps[axis] != 1 else total + start
        return total.unsqueeze(-1)

    @property
    def room(self) -> list[int]:
        """The greatest start of a slice that is inside, along each of `axes`."""
        return [self.dimensions[axis] - self.sizes[axis] for axis in self.axes]


def _gather(context: NodeContext) -> Kernel:
    attributes, operand = context.attributes, context.operand
    sizes = attributes["slice_sizes"]
    rows = _Rows(
        operand.dimensions, sizes, attributes["start_index_map"], attributes["index_vector_axis"], context.shapes[1]
    )
    kept = [size for axis, size in enumerate(sizes) if axis not in attributes["collapsed_slice_axes"]]
    shape = (*rows.batch, *kept)
    offset_axes = attributes["offset_output_axes"]
    order = (*(axis for axis in range(len(shape)) if axis not in offset_axes), *offset_axes)
    permutation = sorted(range(len(order)), key=order.__getitem__)
    offsets, room = rows.offsets(context.device), rows.room
    matrix, count = (rows.count, rows.columns), rows.count

    def gather(x: Tensor, start_indices: Tensor) -> Tensor:
        starts = [start.clamp(0, most) for start, most in zip(rows.starts(start_indices), room, strict=True)]
        found = (rows.first(starts, x) + offsets).reshape(-1)
        return x.reshape(matrix).index_select(0, found).reshape(shape).permute(permutation)

    return gather if count else lambda x, start_indices: x.new_empty(context.output.dimensions)


def _scatter(combine: Callable[[Tensor, Tensor, Tensor], Tensor], ordered: bool) -> Binder:
    """combine: of a matrix, row numbers and rows to be combined with those of these numbers."""

    def bind(context: NodeContext) -> Kernel:
        attributes, operand, dtype = context.attributes, context.operand, context.dtype
        updates = context.shapes[2]
        window_axes, inserted = attributes["update_window_axes"], attributes["inserted_window_axes"]
        window = iter(window_axes)
        sizes = tuple(1 if axis in inserted else updates.dimensions[next(window)] for axis in range(operand.rank))
        axes = attributes["scatter_axes_to_operand_axes"]
        rows = _Rows(operand.dimensions, sizes, axes, attributes["index_vector_axis"], context.shapes[1])
        order = (*(axis for axis in range(updates.rank) if axis not in window_axes), *window_axes)
        offsets, room, count, columns = rows.offsets(context.device), rows.room, rows.count, rows.columns
        inward, back = _values(dtype, ordered)
        possible = all(most >= 0 for most in room)

        def scatter(x: Tensor, scatter_indices: Tensor, given: Tensor) -> Tensor:
            starts = rows.starts(scatter_indices)
            found = rows.first(starts, x) + offsets
            for start, most in zip(starts, room, strict=True):
                # A slice partly outside goes into a row of its own, behind the last.
                found = torch.where(((start >= 0) & (start <= most)).unsqueeze(-1), found, count)
            matrix = inward(x).reshape(count, columns)
            behind = torch.cat((matrix, matrix.new_zeros((1, columns))))
            slices = inward(given).permute(order).reshape(-1, columns)
            return back(combine(behind, found.reshape(-1), slices)[:-1].reshape(operand.dimensions))

        return scatter if possible and operand.size and updates.size else lambda x, *_: x

    return bind


def _values(dtype: DType, ordered: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    if dtype.is_float and dtype.size < 4:
        return (lambda x: wide(x, dtype)), (lambda x: narrow(x, dtype))
    if dtype is DType.BOOL:
        return (lambda x: x.to(torch.uint8)), (lambda x: x.to(torch.bool))
    if ordered:
        return swapped(dtype), swapped(dtype)
    return (lambda x: x), (lambda x: x)


def _extreme(reduction: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, at, rows: x.scatter_reduce(0, at.unsqueeze(-1).expand(rows.shape), rows, reduction)


def _multiplied(x: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    if not x.is_complex():
        return x.scatter_reduce(0, at.unsqueeze(-1).expand(rows.shape), rows, "prod")
    # ATen has no such product of complex numbers: the updates of one row after the other, by their place in a row.
    for number in range(at.numel()):
        x = x.index_copy(0, at[number : number + 1], x[at[number : number + 1]] * rows[number : number + 1])
    return x


INDEXING: dict[OpType, Binder] = {
    OpType.GATHER: _gather,
    OpType.SCATTER_SUM: _scatter(lambda x, at, rows: x.index_add(0, at, rows), ordered=False),
    OpType.SCATTER_SET: _scatter(lambda x, at, rows: x.index_copy(0, at, rows), ordered=False),
    OpType.SCATTER_MULTIPLY: _scatter(_multiplied, ordered=False),
    OpType.SCATTER_MAX: _scatter(_extreme("amax"), ordered=True),
    OpType.SCATTER_MIN: _scatter(_extreme("amin"), ordered=True),
}
