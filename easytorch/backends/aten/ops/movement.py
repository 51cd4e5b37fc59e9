"""Operations that rearrange elements; most are views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.ops.conversion import converter
from easytorch.backends.aten.storage_dtypes import indices, is_word, storage_dtype
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType, PadAxis


def _iota(context: NodeContext) -> Kernel:
    shape, axis = context.output, context.attributes["iota_axis"]
    count = torch.arange(shape.dimensions[axis], dtype=torch.int64, device=context.device)
    sizes = [1] * shape.rank
    sizes[axis] = shape.dimensions[axis]
    values = converter(DType.INT64, shape.dtype)(count).reshape(sizes).expand(shape.dimensions)
    return lambda: values


def _reshape(context: NodeContext) -> Kernel:
    dimensions = context.output.dimensions
    return lambda x: x.reshape(dimensions)


def _transpose(context: NodeContext) -> Kernel:
    permutations = context.attributes["permutations"]
    return lambda x: x.permute(permutations)


def _broadcast(context: NodeContext) -> Kernel:
    dimensions = context.output.dimensions
    return lambda x: x.expand(dimensions)


def _broadcast_in_dim(context: NodeContext) -> Kernel:
    dimensions = context.output.dimensions
    sizes = [1] * len(dimensions)
    for axis, size in zip(context.attributes["broadcast_axes"], context.operand.dimensions, strict=True):
        sizes[axis] = size
    if tuple(sizes) == context.operand.dimensions:
        return lambda x: x.expand(dimensions)
    return lambda x: x.reshape(sizes).expand(dimensions)


def _concatenate(context: NodeContext) -> Kernel:
    axis = context.attributes["axis"]
    return lambda *xs: torch.cat(xs, axis)


def _slice(context: NodeContext) -> Kernel:
    if not context.operand.rank:
        return lambda x: x
    settings = (context.attributes[name] for name in ("starts", "limits", "strides"))
    return operator.itemgetter(tuple(slice(*each) for each in zip(*settings, strict=True)))


def _reverse(context: NodeContext) -> Kernel:
    axes = context.attributes["axes"]
    return lambda x: torch.flip(x, axes)


def _pad(context: NodeContext) -> Kernel:
    given = context.attributes["axes_config"]
    config = (*given, *(PadAxis() for _ in range(context.operand.rank - len(given))))
    fill_op = context.node.inputs[1].node
    fill = None
    if (
        fill_op.op_type is OpType.CONSTANT
        and not is_word(context.dtype)
        and storage_dtype(context.dtype) != torch.uint8
    ):
        fill = fill_op.attributes["value"].item()
    return padder(context.operand.dimensions, config, fill)


def padder(
    dimensions: Sequence[int], config: Sequence[PadAxis], fill: complex | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of an array and a scalar tensor that pads; fill: the scalar, where it is known before."""
    sizes, crop, place = [], [], []
    for size, pad in zip(dimensions, config, strict=True):
        step = pad.interior + 1
        full = max((size - 1) * step + 1, 0)
        padded = full + pad.start + pad.end
        # Element i stands at start + i * step: what stands outside is cropped.
        first = max(-(pad.start // step), 0) if pad.start < 0 else 0
        last = min((padded - 1 - pad.start) // step, size - 1)
        crop.append(slice(first, max(last + 1, first)))
        start = pad.start + first * step
        place.append(slice(min(start, padded), padded if last < first else start + (last - first) * step + 1, step))
        if last < first:
            place[-1] = slice(0, 0)
        sizes.append(padded)
    cropped, placed = tuple(crop), tuple(place)
    if all(not pad.interior for pad in config) and fill is not None:
        amounts = [amount for pad in reversed(config) for amount in (pad.start, pad.end)]
        if all(one.stop - one.start == size for one, size in zip(crop, dimensions, strict=True)):
            # Not functional.pad, which makes a float of the scalar.
            return lambda x, _: torch.constant_pad_nd(x, amounts, fill)

    def filled(x: Tensor, value: Tensor) -> Tensor:
        result = value.expand(sizes).clone(memory_format=torch.contiguous_format)
        result[placed] = x[cropped]
        return result

    return filled


def _dynamic_slice(context: NodeContext) -> Kernel:
    sizes, limits, dtypes = context.attributes["slice_dims"], context.operand.dimensions, context.shapes[1:]
    moving = [axis for axis, (size, full) in enumerate(zip(sizes, limits, strict=True)) if size < full]
    if looks(context):

        def sliced(x: Tensor, *starts: Tensor) -> Tensor:
            for axis in moving:
                x = x.narrow(axis, _start(starts[axis], dtypes[axis].dtype, limits[axis] - sizes[axis]), sizes[axis])
            return x

        return sliced

    def selected(x: Tensor, *starts: Tensor) -> Tensor:
        for axis in moving:
            x = x.index_select(axis, _span(starts[axis], dtypes[axis].dtype, limits[axis], sizes[axis]))
        return x

    return selected


def _dynamic_update_slice(context: NodeContext) -> Kernel:
    limits, sizes, dtypes = context.operand.dimensions, context.shapes[1].dimensions, context.shapes[2:]
    moving = [axis for axis, (size, full) in enumerate(zip(sizes, limits, strict=True)) if size < full]
    in_place = dynamic_update_in_place(context)
    if looks(context) or not moving:
        return lambda x, update, *starts: in_place(x.clone(), update, *starts)
    if len(moving) == 1:
        (axis,) = moving

        def copied(x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
            return x.index_copy(axis, _span(starts[axis], dtypes[axis].dtype, limits[axis], sizes[axis]), update)

        return copied
    rank = len(limits)

    def put(x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        places = [
            _span(start, shape.dtype, limits[axis], sizes[axis]).reshape([-1 if a == axis else 1 for a in range(rank)])
            for axis, (start, shape) in enumerate(zip(starts, dtypes, strict=True))
        ]
        return x.index_put(tuple(places), update)

    return put


def dynamic_update_in_place(context: NodeContext) -> Kernel:
    """The update written into the operand itself, for an operand that nothing else needs."""
    limits, sizes, dtypes = context.operand.dimensions, context.shapes[1].dimensions, context.shapes[2:]
    moving = [axis for axis, (size, full) in enumerate(zip(sizes, limits, strict=True)) if size < full]

    def written(x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        place = x
        for axis in moving:
            start = _start(starts[axis], dtypes[axis].dtype, limits[axis] - sizes[axis])
            place = place.narrow(axis, start, sizes[axis])
        place.copy_(update)
        return x

    return written


def looks(context: NodeContext) -> bool:
    """Whether reading a start index is free: on the CPU and outside of torch.compile."""
    return context.device.type == "cpu" and not context.traced


def _start(start: Tensor, dtype: DType, most: int) -> int:
    value = int(start)
    if is_word(dtype) and value < 0:
        value += 2**dtype.bits
    return min(max(value, 0), most)


def _span(start: Tensor, dtype: DType, full: int, size: int) -> Tensor:
    first = indices(start, dtype).clamp(0, full - size)
    return first + torch.arange(size, dtype=torch.int64, device=start.device)


MOVEMENT: dict[OpType, Binder] = {
    OpType.IOTA: _iota,
    OpType.RESHAPE: _reshape,
    OpType.TRANSPOSE: _transpose,
    OpType.BROADCAST: _broadcast,
    OpType.BROADCAST_IN_DIM: _broadcast_in_dim,
    OpType.CONCATENATE: _concatenate,
    OpType.SLICE: _slice,
    OpType.REVERSE: _reverse,
    OpType.PAD: _pad,
    OpType.DYNAMIC_SLICE: _dynamic_slice,
    OpType.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
}
