"""The gradient of a bias that is the same for all keys of a row: what a sink takes of the row's weight, else zero.

As a sum over the keys most of it cancels, and the rounding of a bfloat16 output would be left of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.blocksparse import native
from easytorch.kernels.cpu import library
from easytorch.operations import OperationMetadata, OperationRegistry

SHAPES = [(2, 4, 65, 1), (1, 4, 1, 1), (1, 1, 65, 1)]


def gradients(name: str, tensors: dict[str, Tensor], grad: Tensor, **features: Any) -> list[Tensor]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    if name == "definition":
        output = native.attention(**leaves, **features)[0]
    else:
        operation, _, implementation = name.partition(":")
        metadata = OperationMetadata(backend=implementation or None)
        output = OperationRegistry.create(operation, metadata)(**leaves, **features).attention_outputs
    return list(torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype)))


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "no-sinks"])
@pytest.mark.parametrize("name", ["flash:aten", "flash:cpu", "flash:xla", "blocksparse", "ring", "ring:native"])
def test_of_a_bias_of_rows(name: str, sinks: bool) -> None:
    draw = torch.Generator().manual_seed(11)
    if name == "flash:cpu" and (reason := library.missing()) is not None:
        pytest.skip(f"no C++ kernels: {reason}")
    for shape in SHAPES[:1] if name == "flash:xla" else SHAPES:  # each is compiled
        heads = {"query": 4, "key": 2, "value": 2}
        tensors = {n: torch.randn(2, 65, h, 24, generator=draw).bfloat16() for n, h in heads.items()}
        tensors["bias"] = torch.randn(shape, generator=draw).bfloat16()
        if sinks:
            tensors["sinks"] = torch.randn(4, generator=draw).bfloat16()
        grad = torch.randn(2, 65, 4, 24, generator=draw).bfloat16()
        found = gradients(name, tensors, grad, causal=True)
        expected = gradients("definition", {n: x.double() for n, x in tensors.items()}, grad.double(), causal=True)
        for one, other in zip(found, expected, strict=True):
            # without sinks the gradient of the bias is 0: then of what its summands are
            largest = other.square().mean().sqrt().clamp(min=0.1)
            error = (one.double() - other).square().mean().sqrt() / largest
            assert error < 1.6e-2, (shape, tuple(one.shape), float(error))
