"""Named layout changes between a torch weight and a Flax one, each with its inverse.

Rule tables use the names. A transform works on numpy arrays and returns views: nothing is copied until a
writer reads the bytes. `parts` is the number of torch tensors that make one Flax leaf, 1 unless the rule fuses
(qkv, gate and up): then `to_flax` is given that many arrays and `to_torch` returns as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from easytorch.bridge.core.boxes import Box

Arrays = Sequence[np.ndarray]
Shape = tuple[int, ...]
# A box of a leaf, and what makes the box of a torch tensor of its elements.
LeafBox = tuple[Box, Callable[[np.ndarray], np.ndarray]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Transform:
    """How torch tensors become one Flax leaf (`to_flax`) and back (`to_torch`, its exact inverse).

    The shape functions do the same for shapes, so that a file's header can be written before any data is read.
    `rank` is the number of dimensions on the Flax side and `torch_rank` that of each torch tensor, None for any; the
    functions may rely on them. `flax_dtype` is the leaf's element type where it is not torch's, `torch_dtype` torch's
    where it is not the leaf's. `leaves`: how many leaves `parts` tensors become together, where neither side is one
    (the biases of recurrent cells): `to_flax` then returns so many arrays and `to_torch` is given them, and so do the
    functions of shapes. `moves_rows`: the first dimension alone is reordered, so that rows may be of packed bytes too.
    `stacked_along`: the leaf's dimension of layers, where they are stacked, even one alone.
    `box_of`, of (the number of a torch tensor, a box of it, the leaf's shape): the box of the leaf that has its
    elements, for what reads no more than these; None where the whole leaf is to be read.
    `to_flax_parts` gives the leaf as views that follow one another in C order, where
    `to_flax` has to copy them together.
    """

    name: str
    to_flax: Callable[[Arrays], np.ndarray]
    to_torch: Callable[[np.ndarray], Arrays]
    flax_shape: Callable[[Sequence[Shape]], Shape]
    torch_shapes: Callable[[Shape], Sequence[Shape]]
    rank: int | None = None
    torch_rank: int | None = None
    parts: int = 1
    leaves: int = 1
    flax_dtype: str | None = None
    torch_dtype: str | None = None
    to_flax_parts: Callable[[Arrays], Arrays] | None = None
    moves_rows: bool = False
    stacked_along: int | None = None
    box_of: Callable[[int, Box, Shape], LeafBox] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"


def permutation(name: str, to_flax: tuple[int, ...]) -> Transform:
    """One torch tensor whose dimensions are permuted by `to_flax` for Flax."""
    to_torch = tuple(to_flax.index(axis) for axis in range(len(to_flax)))
    return Transform(
        name=name,
        to_flax=lambda arrays: arrays[0].transpose(to_flax),
        to_torch=lambda array: (array.transpose(to_torch),),
        flax_shape=lambda shapes: tuple(shapes[0][axis] for axis in to_flax),
        torch_shapes=lambda shape: (tuple(shape[axis] for axis in to_torch),),
        rank=len(to_flax),
        torch_rank=len(to_flax),
        box_of=lambda number, box, shape: (
            tuple(box[axis] for axis in to_flax),
            lambda array: array.transpose(to_torch),
        ),
    )


_TRANSFORMS: dict[str, Transform] = {}


def register_transform(transform: Transform) -> Transform:
    """Registers `transform` for rule tables; a taken name is an error."""
    if transform.name in _TRANSFORMS:
        raise ValueError(f"a transform called {transform.name!r} is registered already; choose another name")
    _TRANSFORMS[transform.name] = transform
    return transform


def get_transform(name: str) -> Transform:
    """The transform registered as `name`; `ValueError` listing the known ones otherwise."""
    if name not in _TRANSFORMS:
        raise ValueError(f"no transform is called {name!r}; known: {', '.join(sorted(_TRANSFORMS))}")
    return _TRANSFORMS[name]


register_transform(
    Transform(
        name="identity",
        to_flax=lambda arrays: arrays[0],
        to_torch=lambda array: (array,),
        flax_shape=lambda shapes: shapes[0],
        torch_shapes=lambda shape: (shape,),
        box_of=lambda number, box, shape: (box, lambda array: array),
    ),
)
# torch (out, in) <-> Flax (in, out).
register_transform(permutation("linear", (1, 0)))
# torch (out, in, width) <-> Flax (width, in, out).
register_transform(permutation("conv1d", (2, 1, 0)))
# torch (out, in, height, width) <-> Flax (height, width, in, out).
register_transform(permutation("conv2d", (2, 3, 1, 0)))
# torch (out, in, depth, height, width) <-> Flax (depth, height, width, in, out).
register_transform(permutation("conv3d", (2, 3, 4, 1, 0)))
