"""Layouts with parameters: attention kernels with a head axis, layers stacked along an axis.

The transforms here are made for one model, from its config; like those of `bridge/rules/transforms.py` they return
views where numpy can, and each has an exact inverse. torch's matrices are (out, in); D is the width of the model, H the
number of heads, d the head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easytorch.bridge.core.boxes import Box
from easytorch.bridge.core.mapped import give_back
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.computed_transforms import require_count, split_heads
from easytorch.bridge.rules.transforms import LeafBox, Shape, Transform, get_transform


def heads_out(heads: int) -> Transform:
    """torch (H d, D), a query, key or value projection <-> (D, H, d), the kernel of flax's `DenseGeneral`."""
    return split_heads(heads, 0, (2, 0, 1))


def heads_in(heads: int) -> Transform:
    """torch (D, H d), an output projection <-> (H, d, D)."""
    return split_heads(heads, 1, (1, 2, 0))


def heads_bias(heads: int) -> Transform:
    """torch (H d,) <-> (H, d)."""
    return split_heads(heads, 0, (0, 1))


# torch (a, b) <-> (1, a, b): position tables that flax keeps with a batch axis.
with_batch = Transform(
    name="with_batch",
    to_flax=lambda arrays: arrays[0][None],
    to_torch=lambda array: (array[0],),
    flax_shape=lambda shapes: (1, *shapes[0]),
    torch_shapes=lambda shape: (shape[1:],),
    rank=3,
    box_of=lambda number, box, shape: ((slice(0, 1), *box), lambda array: array[0]),
)


def stacked(one: Transform | str, count: int, axis: int) -> Transform:
    """`count` torch tensors, each laid out by `one`, along `axis` of a single leaf (flax's `nn.scan`, experts)."""
    layer = _of_one(one, "stacked")
    require_count(count, "layers of a stack")
    if not isinstance(axis, int) or axis < 0:
        raise ValueError(f"axis {axis!r} of a stack is not one of the leaf's, counted from 0")

    def flax_shape(shapes: Sequence[Shape]) -> Shape:
        if len(set(shapes)) != 1:
            raise CheckpointError(f"layers of one stack have the shapes {sorted(set(shapes))}, and must have one")
        shape = layer.flax_shape(shapes[:1])
        return (*shape[:axis], count, *shape[axis:])

    def torch_shapes(shape: Shape) -> Sequence[Shape]:
        if len(shape) <= axis or shape[axis] != count:
            raise CheckpointError(f"a leaf of shape {shape} is no stack of {count} along axis {axis}")
        return list(layer.torch_shapes((*shape[:axis], *shape[axis + 1 :]))) * count

    def box_of(number: int, box: Box, shape: Shape) -> LeafBox:
        assert layer.box_of is not None
        inner, made = layer.box_of(0, box, (*shape[:axis], *shape[axis + 1 :]))
        return (*inner[:axis], slice(number, number + 1), *inner[axis:]), lambda array: made(array.squeeze(axis))

    return Transform(
        name=f"stacked[{layer.name}, {count}, {axis}]",
        to_flax=lambda arrays: _stack([layer.to_flax([array]) for array in arrays], axis),
        to_torch=lambda array: [made for part in np.moveaxis(array, axis, 0) for made in layer.to_torch(part)],
        flax_shape=flax_shape,
        torch_shapes=torch_shapes,
        rank=None if layer.rank is None else layer.rank + 1,
        torch_rank=layer.torch_rank,
        parts=count,
        flax_dtype=layer.flax_dtype,
        torch_dtype=layer.torch_dtype,
        to_flax_parts=None if axis else lambda arrays: [layer.to_flax([array]) for array in arrays],
        stacked_along=axis,
        box_of=None if layer.box_of is None else box_of,
    )


def _stack(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """`np.stack`, but each array keeps its memory order: writers transpose far faster than numpy."""
    order = sorted(range(arrays[0].ndim), key=lambda place: abs(arrays[0].strides[place]), reverse=True)
    made = np.stack([array.transpose(order) for array in arrays])
    for array in arrays:
        give_back(array)
    places = [1 + order.index(place) for place in range(len(order))]
    return made.transpose([*places[:axis], 0, *places[axis:]])


def joined(one: Transform | str, count: int) -> Transform:
    """`count` leaves, each in the layout `one`, whose torch matrices are concatenated into one along the rows.

    For a row with one torch name and `count` leaves: it reads from the leaves to torch.
    """
    part_of = _of_one(one, "joined")
    require_count(count, "joined leaves")

    def joined_shape(shapes: Sequence[Shape]) -> Shape:
        if len(set(shapes)) != 1:
            raise CheckpointError(f"leaves of one matrix have the shapes {sorted(set(shapes))}, and must have one")
        (part,) = part_of.torch_shapes(shapes[0])
        return (part[0] * count, *part[1:])

    return Transform(
        name=f"joined[{part_of.name}, {count}]",
        to_flax=lambda leaves: np.concatenate([part for leaf in leaves for part in part_of.to_torch(leaf)]),
        to_torch=lambda array: [part_of.to_flax([part]) for part in np.split(array, count)],
        flax_shape=joined_shape,
        torch_shapes=lambda shape: [part_of.flax_shape([(_of_each(shape[0], count), *shape[1:])])] * count,
        parts=count,
    )


def _of_one(one: Transform | str, what: str) -> Transform:
    """The layout of one torch tensor and one leaf; `ValueError` for any other."""
    layer = get_transform(one) if isinstance(one, str) else one
    if not isinstance(layer, Transform):
        raise ValueError(f"{what}({one!r}, ...): is no layout; give the name of one, or a Transform")
    if layer.parts != 1 or layer.leaves != 1 or layer.to_torch is None:
        raise ValueError(
            f"{what}({layer.name}, ...): takes the layout of one tensor and one leaf, and this one has several; give "
            "torch a tensor for each leaf"
        )
    return layer


def _of_each(size: int, heads: int) -> int:
    if size % heads:
        raise CheckpointError(f"{size} rows are not a multiple of {heads} heads or parts; correct config.json")
    return size // heads
