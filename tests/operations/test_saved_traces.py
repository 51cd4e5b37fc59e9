"""A trace by torch.jit of what has parameters with gradients is saved and loaded, with its gradients."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.impl import UnsupportedOperationError


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Product(torch.nn.Module):
    def __init__(self, name: str, weight: Any, *rest: Tensor) -> None:
        super().__init__()
        self.held = [OperationRegistry.create(name), weight]  # a list: neither is a submodule or a parameter
        self.rest = rest
        if isinstance(weight, Tensor):
            self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        operation, weight = self.held
        output: Tensor = operation(x, getattr(self, "weight", weight), *self.rest)
        return output


def saved_and_loaded(module: torch.nn.Module, x: Tensor) -> Any:
    stored = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, x, check_trace=False), stored)
    stored.seek(0)
    return torch.jit.load(stored)


@pytest.mark.parametrize("x_grad", [False, True])
def test_a_grouped_product(x_grad: bool) -> None:
    module = Product("grouped_matmul", randn(3, 8, 12), torch.tensor([4, 0, 6]))
    x = randn(11, 8, seed=1).requires_grad_(x_grad)
    loaded = saved_and_loaded(module, x)
    torch.testing.assert_close(loaded(x), module(x))
    loaded(x).sin().sum().backward()
    got = next(loaded.parameters()).grad
    module(x).sin().sum().backward()
    torch.testing.assert_close(got, module.weight.grad)


class Buffers(torch.nn.Module):
    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.held = [OperationRegistry.create("quantized_matmul"), weight]
        self.register_buffer("data", weight.data)

    def forward(self, x: Tensor) -> Tensor:
        operation, weight = self.held
        output: Tensor = operation(x, dataclasses.replace(weight, data=self.data))
        return output


@pytest.mark.parametrize("kind", ["int8", "fp8_e5m2"])
def test_a_quantized_weight_in_a_buffer(kind: str) -> None:
    module = Buffers(quantize(randn(24, 64), kind))
    x = randn(20, 64, seed=1).requires_grad_()
    loaded = saved_and_loaded(module, x)
    assert [name for name, _ in loaded.named_buffers()] == ["data"]
    loaded.data.view(torch.uint8).zero_()
    for _ in range(3):
        output = loaded(x)
        assert (output == 0).all() and (torch.autograd.grad(output.sum(), x)[0] == 0).all()


@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp4_e2m1", "fp8_e4m3fn", "fp8_e5m2"])
def test_a_quantized_product(kind: str, x_grad: bool) -> None:
    module = Product("quantized_matmul", quantize(randn(24, 64), kind))
    x = randn(20, 64, seed=1).requires_grad_(x_grad)
    loaded = saved_and_loaded(module, x)
    torch.testing.assert_close(loaded(x), module(x), rtol=1e-5, atol=1e-5)
    for _ in range(3 if x_grad else 0):  # TorchScript runs a trace once as it is, and then optimized
        got, expected = (torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (loaded, module))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_torch_func_cannot_transform_says_so() -> None:
    query, key = randn(1, 4, 2, 8), randn(1, 4, 2, 8, seed=1)
    flash = OperationRegistry.create("flash", OperationMetadata(backend="xla"))
    with pytest.raises(UnsupportedOperationError, match=r"torch\.func"):
        torch.func.grad(lambda x: flash(x, key, key).attention_outputs.sum())(query)
    pages = OperationRegistry.create("ragged_page_attention")
    pools, tables = randn(2, 4, 2, 8), (torch.tensor([4]), torch.tensor([[1]]), torch.tensor([0, 4]))

    def attend(x: Tensor) -> Tensor:
        total: Tensor = pages(x, pools, pools, *tables).attention_outputs.sum()
        return total

    assert torch.func.grad(attend)(query[0]).isfinite().all()
