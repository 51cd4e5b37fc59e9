"""quantized_matmul on the CPU: the weight dequantized a block of rows at a time, which the cache holds.

ATen's own 8-bit kernel takes over where it is faster: few rows of 16 bits.
"""

from __future__ import annotations

import torch

from easytorch.kernels.quantized_matmul import operators
from easytorch.kernels.quantized_matmul.formats import decode, spread
from easytorch.kernels.quantized_matmul.native import check_arguments
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight

# Numbers of a block: 512 KiB in 16 bits, half of the second cache of a core.
_BLOCK = 2**18
# Rows up to which ATen's int8 kernel is taken. Measured, (4096, 4096) in bfloat16, against a bfloat16 linear layer:
# 0.69 and 1.86 ms for one row, 2.03 and 2.16 for 8, 7.7 and 3.9 for 32.
_INT8_ROWS = 8


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype; see native.py, errors too."""
    check_arguments(x, weight, bias)
    return _run(x, weight, bias)


def _forward(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if _for_int8_kernel(x, weight):
        scale = weight.scale[:, 0].to(x.dtype)
        output = torch._weight_int8pack_mm(x.contiguous(), weight.data.contiguous(), scale)
        return output if bias is None else output.add_(bias)
    output = x.new_empty(x.shape[0], weight.shape[0])
    work = _working_dtype(x)
    rows = x.to(work)
    for start, end in _blocks(weight):
        product = rows @ _dequantize(weight, start, end, work).t()
        if bias is not None:
            product += bias[start:end]
        output[:, start:end] = product
    return output


def _input_grad(grad: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    work = _working_dtype(grad)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    total = torch.zeros((grad.shape[0], weight.shape[1]), dtype=wide, device=grad.device)
    rows = grad.to(work)
    for start, end in _blocks(weight):
        total += rows[:, start:end] @ _dequantize(weight, start, end, work)
    return total.to(grad.dtype)


def _for_int8_kernel(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Of other widths than multiples of 32 that kernel reads past the end of a row (torch 2.13)."""
    return weight.shape[1] % 32 == 0 and (
        weight.format == "int8" and x.dtype in (torch.bfloat16, torch.float16) and 0 < x.shape[0] <= _INT8_ROWS
        and weight.scale.shape == (weight.shape[0], 1)
    )  # fmt: skip


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    """float16 is multiplied in float32: CPUs without its arithmetic take 5 times as long in float16."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _blocks(weight: QuantizedWeight) -> list[tuple[int, int]]:
    rows, columns = weight.shape
    size = max(1, _BLOCK // columns)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _dequantize(weight: QuantizedWeight, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows start to end of the weight, (end - start, K)."""
    columns, size = weight.shape[1], weight.group_size
    scale = weight.scale if weight.scale.shape[0] == 1 else weight.scale[start:end]
    zero = weight.zero
    if zero is not None:
        zero = spread(zero if zero.shape[0] == 1 else zero[start:end], size, columns)
    numbers = decode(weight.data[start:end], zero, weight.format, columns, dtype)
    return numbers.mul_(spread(scale.to(dtype), size, columns))


_run = operators.define("aten", _forward, _input_grad)
