"""The matmuls of experts and of quantized weights on xla tensors: jax inside the graph equals the CPU's path."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.quantized_matmul.weight import quantize
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(run, tensors, device):
    """The output of `run(device, *tensors)` there, and every gradient, on the host."""
    given = [tensor.to(device).requires_grad_() for tensor in tensors]
    output = run(device, *given)
    output.backward(randn(*output.shape, seed=9, dtype=output.dtype).to(device))
    return [tensor.detach().cpu() for tensor in (output, *(tensor.grad for tensor in given))]


def assert_equal_on_xla(run, tensors, dtype):
    for got, want in zip(results(run, tensors, "xla"), results(run, tensors, "cpu"), strict=True):
        assert got.dtype == want.dtype
        assert relative_rms_error(got, want) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_matmul(with_bias, transposed, dtype):
    operation = OperationRegistry.create("grouped_matmul")
    sizes = torch.tensor([7, 0, 30, 1])
    shapes = [(43, 60), (4, *((36, 60) if transposed else (60, 36))), (4, 36)][: 3 if with_bias else 2]
    tensors = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]

    def run(device, x, weight, bias=None):
        return operation(x, weight, sizes.to(device), bias, transposed=transposed)

    assert_equal_on_xla(run, tensors, dtype)


def test_other_sizes_of_the_groups_compile_nothing(count_programs):
    operation = OperationRegistry.create("grouped_matmul")
    x, weight = randn(20, 8).to("xla"), randn(3, 8, 4).to("xla")
    sizes = [torch.tensor(s).to("xla") for s in ([5, 5, 5], [0, 20, 0])]
    assert operation.choose(x, weight, sizes[0]).backend == "pallas"

    def run():
        for each in sizes:
            operation(x, weight, each).cpu()

    assert count_programs(run) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "int4_zero", "nf4", "fp4_e2m1", "fp8_e4m3fn", "fp8_e5m2"])
def test_quantized_matmul(kind, dtype):
    operation = OperationRegistry.create("quantized_matmul")
    weight = quantize(randn(36, 60), kind.removesuffix("_zero"), 16, symmetric=not kind.endswith("_zero"))

    def run(device, x, bias):
        return operation(x, weight.to(device), bias)

    assert_equal_on_xla(run, [randn(2, 5, 60, seed=1, dtype=dtype), randn(36, seed=2, dtype=dtype)], dtype)


def test_definitions():
    sizes, weight = torch.tensor([3, 4]), quantize(randn(6, 8), "nf4")
    native = OperationMetadata(backend="native")
    grouped = OperationRegistry.create("grouped_matmul", native)
    assert_equal_on_xla(
        lambda device, x, w: grouped(x, w, sizes.to(device)), [randn(9, 8), randn(2, 8, 4)], torch.float32
    )
    quantized = OperationRegistry.create("quantized_matmul", native)
    assert_equal_on_xla(lambda device, x: quantized(x, weight.to(device)), [randn(9, 8)], torch.float32)
