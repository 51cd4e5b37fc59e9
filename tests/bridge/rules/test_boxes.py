"""Boxes of torch tensors, from the boxes of leaves that hold them."""

from __future__ import annotations

import numpy as np
import pytest

from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, stacked, with_batch
from easytorch.bridge.rules.transforms import Transform, get_transform

CASES = [
    (get_transform("identity"), (5, 6)),
    (get_transform("linear"), (5, 6)),
    (get_transform("conv2d"), (3, 4, 5, 6)),
    (with_batch, (5, 6)),
    (heads_out(3), (12, 5)),
    (heads_in(3), (5, 12)),
    (heads_bias(3), (12,)),
    (stacked("linear", 4, 0), (5, 6)),
    (stacked("linear", 4, 1), (5, 6)),
    (stacked(heads_out(3), 4, 1), (12, 5)),
    (stacked(heads_in(3), 4, 0), (5, 12)),
]


@pytest.mark.parametrize(("transform", "shape"), CASES, ids=[one.name for one, _ in CASES])
def test_a_box_is_that_of_the_tensor(transform: Transform, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    tensors = [generator.random(shape) for _ in range(transform.parts)]
    leaf = transform.to_flax(tensors)
    assert transform.box_of is not None
    for trial in range(20):
        number = trial % len(tensors)
        ends = [sorted(generator.choice(size + 1, 2, replace=False)) for size in shape]
        box = tuple(slice(int(start), int(stop)) for start, stop in ends)
        inner, made = transform.box_of(number, box, leaf.shape)
        part = leaf[inner]
        assert np.array_equal(made(part), tensors[number][box])
        least = tensors[number][box].size
        assert least <= part.size <= (least if "heads" not in transform.name else tensors[number].size)
