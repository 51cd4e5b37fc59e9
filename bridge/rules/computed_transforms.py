"""Layouts that rearrange a leaf or compute with its elements; each wraps the transform that makes the leaf.

Arithmetic is done in float64 and rounded once. Where that would lose bits of a 16-bit weight, the leaf is float32,
which preserves every bit: libraries that restore such a tree cast it to the dtype they compute in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from easytorch.bridge.core.boxes import Box
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.transforms import Arrays, LeafBox, Shape, Transform

Elementwise = Callable[[np.ndarray], np.ndarray]

# Arithmetic is done on this many bytes of the result at a time, so that the float64 copy stays small.
_BLOCK_BYTES = 8 << 20


def require_count(value: int, what: str) -> None:
    """`ValueError` unless `value`, the number of `what`, is an integer of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} {what}: give a number of at least 1")


def split_heads(heads: int, axis: int, order: tuple[int, ...]) -> Transform:
    """torch's dimension `axis` (heads * d) split into (heads, d), then all dimensions permuted by `order`."""
    require_count(heads, "heads")
    back = tuple(order.index(place) for place in range(len(order)))

    def split(shape: Shape) -> Shape:
        if shape[axis] % heads:
            raise CheckpointError(f"{shape[axis]} is not a multiple of its {heads} heads; correct config.json")
        return (*shape[:axis], heads, shape[axis] // heads, *shape[axis + 1 :])

    def torch_shape(shape: Shape) -> Shape:
        apart = tuple(shape[place] for place in back)
        if apart[axis] != heads:
            raise CheckpointError(f"a leaf of shape {shape} has {apart[axis]} heads, not {heads}; correct the number")
        return (*apart[:axis], apart[axis] * apart[axis + 1], *apart[axis + 2 :])

    def box_of(number: int, box: Box, shape: Shape) -> LeafBox:
        """Whole heads are read, of which the first and the last may be needed in part."""
        size = tuple(shape[place] for place in back)[axis + 1]
        first, last = box[axis].start // size, -(-box[axis].stop // size)
        apart = (*box[:axis], slice(first, last), slice(0, size), *box[axis + 1 :])
        rows = slice(box[axis].start - first * size, box[axis].stop - first * size)

        def made(array: np.ndarray) -> np.ndarray:
            split = array.transpose(back)
            merged = split.reshape(*split.shape[:axis], -1, *split.shape[axis + 2 :])
            return merged[(slice(None),) * axis + (rows,)]

        return tuple(apart[place] for place in order), made

    return Transform(
        name=f"split_heads[{heads}, {axis}, {order}]",
        to_flax=lambda arrays: arrays[0].reshape(split(arrays[0].shape)).transpose(order),
        to_torch=lambda array: (array.transpose(back).reshape(torch_shape(array.shape)),),
        flax_shape=lambda shapes: tuple(split(shapes[0])[place] for place in order),
        torch_shapes=lambda shape: (torch_shape(shape),),
        rank=len(order),
        torch_rank=len(order) - 1,
        box_of=box_of,
    )


def interleaved(inner: Transform, heads: int) -> Transform:
    """The two halves of every head interleaved, so that rotary pairs are adjacent.

    inner: torch (heads * d, D) <-> a leaf whose last dimension is d. Rows are moved before they are transposed,
    which is far faster than moving elements afterwards; in the other direction the leaf's elements are contiguous.
    """

    def weave(array: np.ndarray) -> np.ndarray:
        halves = array.reshape(heads, 2, -1, array.shape[1])
        return halves.swapaxes(1, 2).reshape(array.shape)

    def unweave(array: np.ndarray) -> np.ndarray:
        pairs = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
        return pairs.swapaxes(-1, -2).reshape(array.shape)

    return replace(
        inner,
        box_of=None,
        name=f"interleaved[{inner.name}]",
        to_flax=lambda arrays: inner.to_flax([weave(arrays[0])]),
        to_flax_parts=None,
        to_torch=lambda array: parts_of(inner, unweave(array)),
    )


def unfolded(inner: Transform, sizes: tuple[int, int]) -> Transform:
    """The leaf's first dimension split into two, of `sizes`: stacks within a stack."""
    count = sizes[0] * sizes[1]

    def folded(shape: Shape) -> Shape:
        if shape[:2] != sizes:
            raise CheckpointError(f"a leaf of shape {shape} is no stack of {sizes[0]} times {sizes[1]}")
        return (count, *shape[2:])

    return replace(
        inner,
        box_of=None,
        name=f"unfolded[{inner.name}, {sizes}]",
        to_flax=lambda arrays: _reshaped(inner.to_flax(arrays), sizes),
        to_torch=lambda array: parts_of(inner, array.reshape(folded(array.shape))),
        flax_shape=lambda shapes: (*sizes, *inner.flax_shape(shapes)[1:]),
        torch_shapes=lambda shape: inner.torch_shapes(folded(shape)),
        rank=None if inner.rank is None else inner.rank + 1,
    )


def cut(inner: Transform, size: int, axis: int) -> Transform:
    """The leaf's dimension `axis` cropped to `size`, to read tables that are padded with unused rows."""
    window = (slice(None),) * axis + (slice(size),)
    return replace(
        inner,
        box_of=None,
        name=f"cut[{inner.name}, {size}, {axis}]",
        to_torch=lambda array: parts_of(inner, array[window]),
        torch_shapes=lambda shape: inner.torch_shapes((*shape[:axis], size, *shape[axis + 1 :])),
    )


def scaled(inner: Transform, factor: float, *, wide: bool, narrow: str | None = None) -> Transform:
    """The leaf times `factor`; exact without `wide` only where that is a power of two."""
    name = f"scaled[{inner.name}, {factor}]"
    return computed(inner, name, lambda a: a * factor, lambda a: a / factor, wide=wide, narrow=narrow)


def shifted(inner: Transform, amount: float, *, wide: bool, narrow: str | None = None) -> Transform:
    """The leaf plus `amount`."""
    name = f"shifted[{inner.name}, {amount}]"
    return computed(inner, name, lambda a: a + amount, lambda a: a - amount, wide=wide, narrow=narrow)


def computed(
    inner: Transform, name: str, forth: Elementwise, back: Elementwise, *, wide: bool, narrow: str | None
) -> Transform:
    """The leaf put through `forth`, and `back`, its inverse.

    wide: the leaf is float32 whatever torch's type is. narrow: torch's type, where it is not the leaf's.
    """
    return replace(
        inner,
        box_of=None,
        name=name,
        to_flax=lambda arrays: _blockwise(forth, inner.to_flax(arrays), "float32" if wide else None),
        to_flax_parts=None,
        to_torch=lambda array: parts_of(inner, _blockwise(back, array, narrow)),
        flax_dtype="float32" if wide else None,
        torch_dtype=narrow,
    )


def _blockwise(function: Elementwise, array: np.ndarray, dtype: str | None) -> np.ndarray:
    """`function` of the elements; the result has the same memory order."""
    order = sorted(range(array.ndim), key=lambda axis: abs(array.strides[axis]), reverse=True)
    given = array.transpose(order)
    made = np.empty(given.shape, array.dtype if dtype is None else dtype)
    rows = max(1, _BLOCK_BYTES * len(given) // max(1, made.nbytes))
    for start in range(0, len(given), rows):
        block = slice(start, start + rows)
        made[block] = function(given[block].astype(np.float64))
    return made.transpose(np.argsort(order))


def _reshaped(array: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    return array.reshape(*sizes, *array.shape[1:])


def parts_of(transform: Transform, array: np.ndarray) -> Arrays:
    """The torch tensors in a leaf."""
    assert transform.to_torch is not None, f"{transform.name} has no inverse"
    return transform.to_torch(array)
