"""Operations on a tensor's memory layout, which a functional graph has only as metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from easytorch.backends.graph import Op
from easytorch.backends.types import OpType
from easytorch.frontend.arrays import take
from easytorch.frontend.aten.indexing import assign_at
from easytorch.frontend.context import Context
from easytorch.frontend.errors import DataDependentError, LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Sizes = Sequence[int]


def fake_of(ctx: Context) -> torch.Tensor | None:
    """The fake tensor of the node's first argument."""
    if ctx.node is None or not isinstance(ctx.node.args[0], torch.fx.Node):
        return None
    value = ctx.node.args[0].meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _memory_order(ctx: Context, x: Op) -> list[int]:
    """The axes of x from the one of the largest stride; `LoweringError` unless they fill their memory."""
    described = fake_of(ctx)
    contiguous = list(range(x.shape.rank))
    if described is None or described.is_contiguous():
        return contiguous
    strides = [int(stride) for stride in described.stride()]
    order = sorted(contiguous, key=lambda axis: (-strides[axis], axis))
    expected = 1
    for axis in reversed(order):
        size = x.shape.dimensions[axis]
        if size > 1 and strides[axis] != expected:
            raise LoweringError(
                f"{'as_strided' if ctx.node is None else ctx.node.target}: it reads the memory of a view with strides "
                f"{tuple(strides)}, of which a functional graph has only the elements; call contiguous() before it"
            )
        expected *= size
    return order


def _places(ctx: Context, x: Op, size: Sizes, stride: Sizes, storage_offset: int | None) -> np.ndarray:
    """The places in memory of each element."""
    at = np.full(tuple(size), storage_offset or 0, np.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        at += (np.arange(count) * step).reshape((-1,) + (1,) * (len(size) - axis - 1))
    if at.size and (at.min() < 0 or at.max() >= x.shape.size):
        raise LoweringError(
            f"as_strided: sizes {tuple(size)} with strides {tuple(stride)} from {storage_offset or 0} reach outside of "
            f"the {x.shape.size} elements"
        )
    return at


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(ctx: Context, x: Op, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Op:
    flat = ctx.reshape(ctx.transpose(x, _memory_order(ctx, x)), (x.shape.size,))
    return take(ctx, flat, 0, _places(ctx, x, size, stride, storage_offset))


@lowering(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: Context, x: Op, src: Op, size: Sizes, stride: Sizes, storage_offset: int | None = None
) -> Op:
    order = _memory_order(ctx, x)
    laid = ctx.transpose(x, order)
    places = _places(ctx, x, size, stride, storage_offset)
    flat, vectors = ctx.reshape(laid, (x.shape.size,)), ctx.constant(places.reshape(-1, 1))
    written = assign_at(ctx, flat, vectors, ctx.reshape(src, (places.size,)), (0,))
    return ctx.transpose(ctx.reshape(written, laid.shape.dimensions), np.argsort(order).tolist())


@lowering(aten.resize.default, aten.resize_.default)
def resize(ctx: Context, x: Op, size: Sizes, *, memory_format: Any = None) -> Op:
    """The elements in memory under other sizes; further ones are zero, where ATen leaves them undefined."""
    flat = ctx.reshape(x, (x.shape.size,))
    wanted = math.prod(size)
    if wanted <= x.shape.size:
        flat = ctx.builder.slice(flat, (0,), (wanted,))
    else:
        rest = ctx.full((wanted - x.shape.size,), 0, x.shape.dtype)
        flat = ctx.builder.concatenate(0, flat, rest)
    return ctx.reshape(flat, size)


@lowering(aten.sym_stride.int)
def sym_stride(ctx: Context, x: Op, dim: int) -> int:
    """The stride in the graph's own description of x."""
    described = fake_of(ctx)
    axis = ctx.axis(dim, x.shape.rank)
    if described is not None and isinstance(described.stride(axis), int):
        return described.stride(axis)
    return math.prod(x.shape.dimensions[axis + 1 :])


@lowering(aten.sym_storage_offset.default)
def sym_storage_offset(ctx: Context, x: Op) -> int:
    described = fake_of(ctx)
    return 0 if described is None else int(described.storage_offset())


@lowering(aten.sym_is_contiguous.default)
def sym_is_contiguous(ctx: Context, x: Op, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    described = fake_of(ctx)
    return described is None or described.is_contiguous(memory_format=memory_format)


@lowering(aten._local_scalar_dense.default)
def local_scalar_dense(ctx: Context, x: Op) -> int | float | bool | complex:
    """The number in a constant."""
    if x.node.op_type is not OpType.CONSTANT:
        raise DataDependentError(
            "item() of a tensor that is computed: its value is not known when the program is compiled; keep it a "
            "tensor (torch.where, index_select) or compute it outside of the module"
        )
    number: int | float | bool | complex = x.node.attributes["value"].reshape(()).item()
    return number


@lowering(aten.atan2.out)
def atan2_out(ctx: Context, x: Op, other: Op, *, out: Op) -> Op:
    """In a functional graph `out` is not read again."""
    first, second = ctx.operands(x, other, dtype=ctx.floating(ctx.promote(x, other)))
    dimensions = ctx.broadcast_dims(first.shape.dimensions, second.shape.dimensions)
    result = ctx.builder.atan2(ctx.expand(first, dimensions), ctx.expand(second, dimensions))
    return ctx.cast(result, out.shape.dtype)
