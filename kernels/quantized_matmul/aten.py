"""quantized_matmul on the CPU: the weight is dequantized in blocks of rows that fit the cache.

ATen's own kernels are used where they are faster, for few rows: int8 with 16-bit x, `prepacked` int4 with bfloat16 x.
"""

from __future__ import annotations

import torch

from easytorch.kernels.linear.products import WIDENED_PARTS
from easytorch.kernels.quantized_matmul import cpu_layout, operators
from easytorch.kernels.quantized_matmul.aten_decode import from_e4m3fn, from_pairs
from easytorch.kernels.quantized_matmul.formats import spread
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS, decode_blocks
from easytorch.kernels.quantized_matmul.interleaved import ROWS
from easytorch.kernels.quantized_matmul.native import check_arguments
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight

# Elements of a block: 512 KiB in 16 bits, half of a core's L2 cache.
_BLOCK = 2**18
# Rows up to which ATen's kernels are used. Measured, (4096, 4096) in bfloat16, int8, int4 and a bfloat16 linear layer:
# 0.69, 0.46 and 1.86 ms for one row, 2.03, 1.62 and 2.16 for 8, 7.7, 6.5 and 3.9 for 32.
_FEW_ROWS = 8


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype; see native.py, errors too."""
    check_arguments(x, weight, bias)
    return _run(x, weight, bias)


def _forward(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if _for_int8_kernel(x, weight):
        output = torch._weight_int8pack_mm(x.contiguous(), weight.data.contiguous(), weight.scale[:, 0].to(x.dtype))
        return output if bias is None else output.add_(bias)
    packed, scale = weight.packed, weight.packed_scale
    if packed is not None and scale is not None and _for_int4_kernel(x):
        output = torch._weight_int4pack_mm_for_cpu(x.contiguous(), packed, weight.group_size, scale)
        return output if bias is None else output.add_(bias)
    output = x.new_empty(x.shape[0], weight.shape[0])
    work = _working_dtype(x)
    rows = x.to(work)
    for start, end in _blocks(weight):
        scale = _scale(weight, start, end, work)
        numbers = _numbers(weight, start, end, work)
        # one scale per row of the weight: cheaper to multiply after the product, unless x has more rows
        behind = scale.shape[1] == 1 and x.shape[0] < weight.shape[1]
        product = _multiply(rows, (numbers if behind else numbers.mul_(scale)).t(), x.dtype)
        if behind:
            product *= scale.t()
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
        numbers = _numbers(weight, start, end, work).mul_(_scale(weight, start, end, work))
        total += _multiply(rows[:, start:end], numbers, grad.dtype)
    return total.to(grad.dtype)


def _multiply(rows: torch.Tensor, numbers: torch.Tensor, given: torch.dtype) -> torch.Tensor:
    """rows @ numbers; in float32 for rows widened from the dtype `given`, which autocast would narrow again."""
    if rows.dtype is given:
        return rows @ numbers
    with torch.autocast("cpu", enabled=False):
        return rows @ numbers


def _for_int8_kernel(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """The kernel reads past the end of a row whose width is no multiple of 32 (torch 2.13)."""
    return weight.shape[1] % 32 == 0 and not weight.interleaved and (
        weight.format == "int8" and x.dtype in (torch.bfloat16, torch.float16) and 0 < x.shape[0] <= _FEW_ROWS
        and weight.scale.shape == (weight.shape[0], 1)
    )  # fmt: skip


def _for_int4_kernel(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= _FEW_ROWS


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    """16 bits are multiplied in float32 where the CPU has no instructions for them: it takes 4 to 9 times as long."""
    return torch.float32 if x.dtype in WIDENED_PARTS else x.dtype


def _blocks(weight: QuantizedWeight) -> list[tuple[int, int]]:
    rows, columns = weight.shape
    size = max(1, _BLOCK // columns)
    if weight.interleaved:
        size = -(-size // ROWS) * ROWS
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _scale(weight: QuantizedWeight, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """The scale of the weight's rows [start, end): (end - start or 1, K or 1)."""
    scale = weight.scale if weight.scale.shape[0] == 1 else weight.scale[start:end]
    return spread(scale.to(dtype), weight.group_size, weight.shape[1])


def _rows(weight: QuantizedWeight, start: int, end: int) -> torch.Tensor:
    """The stored rows [start, end), multiples of 16 where they are interleaved."""
    if not weight.interleaved:
        return weight.data[start:end]
    return cpu_layout.separate(weight.data[start // ROWS : end // ROWS], weight.format, weight.shape[1])


def _numbers(weight: QuantizedWeight, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of rows [start, end) before scaling, (end - start, K)."""
    data, columns = _rows(weight, start, end), weight.shape[1]
    if weight.format in BLOCKS:
        return decode_blocks(data, weight.format, dtype)
    if weight.format == "fp8_e4m3fn":
        return from_e4m3fn(data, dtype)
    if weight.format == "fp8_e5m2":
        return (data.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).to(dtype)
    if weight.format == "int8":
        return data.to(dtype)
    numbers = from_pairs(data, weight.format, dtype)[:, :columns]
    if weight.zero is not None:
        zero = weight.zero if weight.zero.shape[0] == 1 else weight.zero[start:end]
        numbers -= spread(zero.to(dtype) - 8, weight.group_size, columns)
    return numbers


_run = operators.define("aten", _forward, _input_grad)
