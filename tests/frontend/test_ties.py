"""topk and sort of equal elements: the indices that ATen gives on a CPU, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import easytorch.frontend
from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.aot import AbsentDevices
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowerings

# (size, k): insertion sort alone, nth_element, then std::sort of many, partial_sort of a few of many, everything.
SIZES = ((3, 2), (8, 3), (40, 7), (70, 33), (130, 129), (128, 2), (200, 3), (50, 50), (64, 1))


class Ordered(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def check(function: Callable[[torch.Tensor], Any], backend: str, *samples: torch.Tensor) -> None:
    program = easytorch.frontend.compile(Ordered(function), (samples[0],), backend=backend)
    for x in samples:
        torch.testing.assert_close(program(x), function(x), rtol=0, atol=0, equal_nan=True)


def ties(shape: tuple[int, ...], levels: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Few different values, so that most are equal to others."""
    found = torch.randint(-levels, levels + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if dtype.is_floating_point:
        found[..., :: max(shape[-1] // 3, 1)] = torch.nan
    return found


@pytest.mark.parametrize(
    ("count", "k", "backend"),
    [
        *((*size, "torch") for size in SIZES),
        *((*size, "numpy") for size in ((3, 2), (40, 7), (50, 50))),
        *((*size, "xla:cpu") for size in ((8, 3), (70, 33))),
    ],
)
def test_topk(count: int, k: int, backend: str) -> None:
    largest, ordered = bool(k % 2), bool(count % 3)
    samples = [ties((3, count), levels, torch.float32, seed) for seed, levels in enumerate((0, 1, 4, 12))]
    samples.append(torch.arange(3 * count, dtype=torch.float32).reshape(3, count).flip(1))
    check(lambda x: torch.topk(x, k, -1, largest, True), backend, *samples)
    if not ordered:
        check(lambda x: torch.topk(x, k, -1, largest, False).indices.sort(-1).values, backend, *samples)


@pytest.mark.parametrize(
    ("dtype", "descending", "backend"),
    [
        (torch.bfloat16, True, "torch"),
        (torch.int64, False, "torch"),
        (torch.bool, True, "torch"),
        (torch.float32, True, "numpy"),
        (torch.float32, False, "xla:cpu"),
    ],
)
def test_sort(dtype: torch.dtype, descending: bool, backend: str) -> None:
    for shape, dim in (((2, 45), 1), ((150, 2), 0), ((2, 10), 1))[: 1 if backend == "xla:cpu" else 3]:
        samples = [ties(shape, levels, dtype, seed) for seed, levels in enumerate((1, 6))]
        for stable in (False, True):
            function = functools.partial(torch.sort, dim=dim, descending=descending, stable=stable)
            check(function, backend, *samples)


def test_a_tie_of_the_last_taken_and_the_first_left_out() -> None:
    """No other elements are equal: which of the two is taken is by where ATen's partitions leave them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.stack([torch.randperm(40, generator=generator) for _ in range(32)]).float()
    x[x == 32.0] = 33.0
    assert not torch.equal(x.topk(7).indices, torch.sort(x, stable=True, dim=-1, descending=True).indices[:, :7])
    check(lambda x: torch.topk(x, 7), "torch", x)


def test_a_long_vector_of_integers_is_sorted_by_radix() -> None:
    x = ties((33000,), 9, torch.int32, 0)
    check(torch.sort, "torch", x)
    check(lambda x: torch.argsort(x, descending=True), "torch", x)


@pytest.mark.parametrize("k", [7, 2])  # nth_element and sort, and partial_sort of few of many
def test_no_literal_grows_with_the_rows(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Literals are written into the program as text: those of a router's topk over a batch would be gigabytes."""
    sizes = []
    constant = Builder.constant

    def recorded(self: Builder, flat: Any, *dims: Any) -> Op:
        sizes.append(np.size(flat))
        return constant(self, flat, *dims)

    monkeypatch.setattr(Builder, "constant", recorded)
    for function in (lambda x: torch.topk(x, k), lambda x: torch.sort(x, stable=False)):
        easytorch.frontend.compile(Ordered(function), (torch.zeros(30, 128),), backend="torch")
    assert sizes and max(sizes) < 30


def test_divided_over_a_mesh_the_first_of_equal_elements_are_taken() -> None:
    """ATen's order of them would be computed from the rows of all devices, on each."""
    builder = AbsentDevices(2).builder("routing")
    builder.distributed_auto_sharding({"dp": 2})
    x = builder.parameter("x", Shape(DType.FLOAT32, (64, 40)), ("dp", None))
    topk = lowerings()[torch.ops.aten.topk.default]
    topk(Context(builder, _nothing_inside), x, 7)
    builder.cond(builder.constant(True), *[lambda inner: topk(Context(inner, _nothing_inside), x, 7)] * 2)
    controls = [node.op_type for node in builder.graph.nodes if node.op_type in (OpType.COND, OpType.WHILE_LOOP)]
    (choice,) = (node for node in builder.graph.nodes if node.op_type is OpType.COND)
    assert controls == [OpType.COND]
    assert not [node for node in choice.attributes["true_branch"].nodes if node.op_type is OpType.COND]


def _nothing_inside(*graphs: Any) -> Any:
    raise AssertionError("no other graph is part of this one")
