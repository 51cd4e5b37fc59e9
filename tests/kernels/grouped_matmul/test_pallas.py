"""The grouped matmul for TPU on the CPU: the Pallas kernels interpreted, and what jax runs where there is no TPU."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.grouped_matmul import native
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

pytest.importorskip("jax", reason="jax is not installed: pip install easytorch[jax]")

# M, K, N and the sizes of the groups; none a multiple of a tile, but the last
CASES = {
    "uneven, one empty, rows left over": (63, 60, 36, [7, 0, 30, 1, 20]),
    "tiles of several groups": (420, 130, 200, [300, 5, 0, 100]),
    "none": (20, 130, 200, [0, 0]),
    "whole tiles": (256, 256, 512, [128, 0, 128]),
}


def jax_array(tensor: torch.Tensor):
    from easytorch.kernels.interop.dlpack import to_jax

    return to_jax(tensor.detach())


def torch_tensor(array) -> torch.Tensor:
    from easytorch.kernels.interop.dlpack import to_torch

    return to_torch(array)


def operands(case, transposed: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, depth, width, sizes = case
    generator = torch.Generator().manual_seed(0)
    stored = (width, depth) if transposed else (depth, width)
    shapes = [(rows, depth), (len(sizes), *stored), (len(sizes), width), (rows, width)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made[0][sum(sizes) :] = float("nan")  # rows of no group
    return [*made, torch.tensor(sizes, dtype=torch.int32)]


def expected(x, weight, bias, upstream, sizes, transposed: bool) -> tuple[torch.Tensor, ...]:
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    output = native.grouped_matmul(*wide[:2], sizes, wide[2], transposed=transposed)
    return output.detach(), *torch.autograd.grad(output, wide, upstream.double())


@pytest.mark.parametrize(
    ("case", "transposed", "dtype"),
    [(case, i % 2 == 1, torch.bfloat16 if i == 1 else torch.float32) for i, case in enumerate(CASES.values())],
    ids=[*CASES],
)
def test_the_kernels_interpreted(case, transposed: bool, dtype: torch.dtype) -> None:
    from easytorch.kernels.grouped_matmul import pallas_kernels

    x, weight, bias, upstream, sizes = operands(case, transposed, dtype)
    output, x_grad, weight_grad, _ = expected(x, weight, torch.zeros_like(bias), upstream, sizes, transposed)
    arrays = [jax_array(tensor) for tensor in (x, weight, upstream, sizes)]
    left, right = (arrays[2], arrays[0]) if transposed else (arrays[0], arrays[2])
    for got, want in (
        (pallas_kernels.grouped_matmul(*arrays[:2], arrays[3], transposed=transposed, interpret=True), output),
        (
            pallas_kernels.grouped_matmul(arrays[2], arrays[1], arrays[3], transposed=not transposed, interpret=True),
            x_grad,
        ),
        (pallas_kernels.grouped_weight_grad(left, right, arrays[3], interpret=True), weight_grad),
    ):
        assert relative_rms_error(torch_tensor(got), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_tpu(case, transposed: bool) -> None:
    from easytorch.kernels.grouped_matmul import pallas_or_jax

    x, weight, bias, upstream, sizes = operands(case, transposed, torch.float32)
    arrays = [jax_array(tensor) for tensor in (x, weight, sizes, bias)]
    (output,) = pallas_or_jax.forward(*arrays, transposed=transposed)
    x_grad, weight_grad, none, bias_grad = pallas_or_jax.backward(
        *arrays, output, jax_array(upstream), transposed=transposed
    )
    assert none is None
    for got, want in zip(
        (output, x_grad, weight_grad, bias_grad), expected(x, weight, bias, upstream, sizes, transposed), strict=True
    ):
        assert relative_rms_error(torch_tensor(got), want) <= TOLERANCE[torch.float32]


def test_no_rows_and_sizes_past_the_rows() -> None:
    from easytorch.kernels.grouped_matmul import pallas_or_jax

    x, weight = torch.randn(0, 8), torch.randn(2, 8, 4)
    sizes = torch.zeros(2, dtype=torch.int32)
    assert pallas_or_jax.forward(*map(jax_array, (x, weight, sizes)), transposed=False)[0].shape == (0, 4)
    x, sizes = torch.randn(5, 8), torch.tensor([3, 9], dtype=torch.int32)
    (got,) = pallas_or_jax.forward(*map(jax_array, (x, weight, sizes)), transposed=False)
    # refused where sizes can be read; inside a graph the rows there are belong to the groups that come first
    expected = native.grouped_matmul(x, weight, torch.tensor([3, 2], dtype=torch.int32))
    torch.testing.assert_close(torch_tensor(got), expected, rtol=1e-4, atol=1e-5)
