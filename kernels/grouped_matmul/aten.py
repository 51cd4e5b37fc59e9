"""grouped_matmul on the CPU: one ATen matmul for each group that has rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.grouped_matmul import operators
from easytorch.kernels.grouped_matmul.native import check_arguments
from easytorch.kernels.linear import onednn, preference, products

# Rows from which a 16-bit dtype that the CPU has no instructions for is multiplied in float32. Measured of float16,
# K 1024 and N 768, 2 threads: 0.25 against 0.34 ms for 4 rows, 33 against 6 ms for 512; 284 where the weight is (K, N).
_WIDENED_ROWS = 8
# Multiplications from which oneDNN's tenth to quarter pays for the 0.6 ms that it takes to prepare for a number of rows
# it has not met: those of a group are seldom the same twice.
_ONEDNN_WORK = 2**28


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,), bias (E, N) -> (M, N), see native.py.

    Raises `ValueError` for shapes that do not fit, and where it runs for sizes that are negative or sum to more than M.
    """
    check_arguments(x, weight, group_sizes, bias, transposed)
    return _multiply(x, weight, group_sizes, bias, transposed)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    matrices = weight.transpose(1, 2) if transposed else weight
    groups = list(_groups(group_sizes, x.shape[0]))
    end = groups[-1][2] if groups else 0
    if bias is None and _for_grouped_mm(x, matrices, groups):
        output = torch._grouped_mm(x, matrices, offs=group_sizes.cumsum(0, dtype=torch.int32))
        output[end:].zero_()
        return output
    output = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, start, stop in groups:
        added = None if bias is None else bias[expert]
        _multiply_into(output[start:stop], x[start:stop], matrices[expert], added)
    output[end:].zero_()
    return output


def _weight_grad(left: torch.Tensor, right: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    output = left.new_zeros(group_sizes.shape[0], left.shape[1], right.shape[1])
    for expert, start, end in _groups(group_sizes, left.shape[0]):
        _multiply_into(output[expert], left[start:end].t(), right[start:end], None)
    return output


def _groups(group_sizes: torch.Tensor, rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of each group that has rows."""
    sizes = group_sizes.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise ValueError(f"grouped_matmul: group_sizes must not be negative nor sum to more than {rows}, got {sizes}")
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, start, start + size
        start += size


def _multiply_into(output: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> None:
    """output = left @ right + bias, summed in float32 and rounded once."""
    many = left.shape[0] >= _WIDENED_ROWS or (left.dtype == torch.float16 and right.stride(0) != 1)
    if left.dtype in products.WIDENED_PARTS and many:
        output.copy_(products.in_float32(left, right.t(), bias))
    elif _for_onednn(left, right):
        output.copy_(onednn.linear(left, right.t(), bias))
    elif bias is None:
        torch.mm(left, right, out=output)
    else:
        torch.addmm(bias, left, right, out=output)


def _for_grouped_mm(x: torch.Tensor, matrices: torch.Tensor, groups: list[tuple[int, int, int]]) -> bool:
    """Whether ATen's loop in C++ carries the call, and none of its groups is faster in another way.

    It saves 20 us a group: 1.4 against 1.7 ms for 13 groups of a row each in bfloat16.
    """
    largest = max((end - start for _, start, end in groups), default=0)
    if largest == 0 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    slow = largest >= 2 * _WIDENED_ROWS or (x.dtype == torch.float16 and matrices.stride(1) != 1)
    if x.dtype in products.WIDENED_PARTS and slow:
        return False
    if _for_onednn(x[:largest], matrices[0]):
        return False
    # its rule: rows adjacent or columns adjacent, the rest in steps of 16 bytes
    return all(_aligned(operand) for operand in (x, matrices))


def _aligned(operand: torch.Tensor) -> bool:
    unit = 16 // operand.element_size()
    row, column = operand.stride()[-2:]
    steps = (row if column == 1 else column, *operand.stride()[:-2])
    long = operand.shape[-1 if column == 1 else -2]
    dense = (column == 1 and row >= long) or (row == 1 and column >= long)
    return dense and operand.data_ptr() % 16 == 0 and all(step % unit == 0 for step in steps)


def _for_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != torch.float32 or left.shape[0] * right.numel() < _ONEDNN_WORK:
        return False
    return preference.prefers_onednn(left, right, False) and onednn.supports(left, right) is None


_multiply = operators.define("aten", _forward, _weight_grad)
