"""quantized_matmul of few rows by the C++ operator (cpu*.cpp), in one of five ways (cpu_rows.h).

Rows of x become integers of two or three bytes, which multiply integer codes (AVX512_VNNI): any number where the rows
of the weight are interleaved (interleaved.py), up to four where they lie one after another; nf4 and fp8 become
bfloat16; of more rows the weight is decoded a few rows at a time; elsewhere codes are decoded to float32 as they are
accumulated.

Such integers share a power of two over 32 columns, or 128 or 256. Where a few numbers of x are so much larger than
most others there that these would lose more than their dtype does, the row is computed with one byte more or in float32
(`stands_out` in cpu_integers.h).
"""

from __future__ import annotations

import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import DTYPES
from easytorch.kernels.interop.torch_func import eager, forward_mode, recording
from easytorch.kernels.quantized_matmul import aten, operators
from easytorch.kernels.quantized_matmul.cpu_layout import BLOCK_FORMATS as BLOCK_FORMATS
from easytorch.kernels.quantized_matmul.cpu_layout import FORMATS as FORMATS
from easytorch.kernels.quantized_matmul.cpu_layout import NUMBERS as NUMBERS
from easytorch.kernels.quantized_matmul.native import check_arguments
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight

# Columns that are decoded together: groups start at multiples of it.
STEP = 32
# Rows up to which it is chosen. Time divided by ATen's for (4096, 1024) and 1, 4, 16 rows of bfloat16, one thread of
# a loaded AMD EPYC (Zen 4), when int8 and int4 were decoded: int8 0.51, 0.59, 0.68; int4 0.07, 0.11, 0.35; nf4 0.07,
# 0.11, 0.40; fp8_e4m3fn 0.13, 0.17, 0.56; fp8_e5m2 0.05, 0.07, 0.21. Interleaved codes and 5, 8, 16 rows of bfloat16:
# int8 0.40, 0.42, 0.32; int4 0.03, 0.05, 0.06; q4_0 0.01, 0.02, 0.04. One row of nf4 and fp8_e4m3fn, of a bfloat16
# product and of a plain read of the codes: 0.42 and 1.96, 0.51 and 1.30; the others are in docs/kernels/cpu.md.
# Blocks that are decoded as they are accumulated, of a product in bfloat16 and in float32: q4_1 0.67 and 0.39, iq4_nl
# 0.68 and 0.55, iq4_xs 1.33 and 0.75, q2_k 1.87 and 0.97, q5_0 2.13 and 1.08, q5_1 2.54 and 1.30, q5_k 2.65 and 1.50,
# q3_k 3.55 and 1.93.
MOST_ROWS = 16
# The same of interleaved codes. Time divided by ATen's for (4096, 1024) and 32, 128, 512 rows, one thread of a loaded
# Zen 4, bfloat16 and float32: q4_0 0.14, 0.36, 0.77 and 0.22, 0.45, 0.59; q4_k 0.17, 0.42, 0.82 and 0.21, 0.43, 0.80;
# q8_0 0.26, 0.53, 0.81 and 0.32, 0.52, 0.64; int8 0.47, 0.72, 0.88 and 0.43, 0.57, 0.64. 512 rows of a plain product
# take 1.45 of q4_0's time in float32, 0.88 in bfloat16.
MOST_INTERLEAVED_ROWS = 2048
# The same in bfloat16 where a decoded weight is multiplied by AMX, whose peak is 16 times that of AVX512_BF16:
# reckoned, not measured. Decoding (4096, 1024) takes as long as interleaved codes and some 64 rows.
MOST_ROWS_BESIDE_AMX = 64
_NO_BIAS, _NO_ZERO = torch.empty(0), torch.empty(0, dtype=torch.uint8)


def supports(x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype | None) -> str | None:
    """None when `quantized_matmul` takes this call, else the reason. dtype: what x is cast to. May build the
    library."""
    if (dtype or x.dtype) == torch.float64:
        return "it computes in float32, got float64"
    if x.layout != torch.strided:
        return f"it takes dense tensors, got {x.layout}"
    if forward_mode():
        return "it has no forward-mode gradient"
    if isinstance(weight, QuantizedWeight) and not _aligned(weight):
        return f"it takes groups of a multiple of {STEP} columns, got {weight.group_size}"
    return library.missing()


def _aligned(weight: QuantizedWeight) -> bool:
    return weight.group_size % STEP == 0 or weight.scale.shape[1] == 1


def takes_codes(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int) -> bool:
    """Whether the operator takes a weight of these tensors as they lie in memory."""
    return (
        codes.is_cpu
        and codes.is_contiguous()
        and scale.is_contiguous()
        and (zero is None or zero.is_contiguous())
        and (group_size % STEP == 0 or scale.shape[1] == 1)
    )


def prefers(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> bool:
    """True where it is faster than ATen, without gradients; measured with AVX2 and more."""
    return (
        processor.AVX2
        and eager()
        and torch._C._get_tracing_state() is None
        and x.is_cpu
        and isinstance(weight, QuantizedWeight)
        and weight.data.is_cpu
        and 0 < x.numel() <= _most_rows(x.dtype, weight.interleaved) * weight.shape[1]
        and _aligned(weight)
        and not (weight.packed is not None and aten._for_int4_kernel(x))
        and not recording(x, bias)
    )


def _most_rows(dtype: torch.dtype, interleaved: bool) -> int:
    if not interleaved:
        return MOST_ROWS
    return MOST_ROWS_BESIDE_AMX if processor.AMX_PRODUCTS and dtype == torch.bfloat16 else MOST_INTERLEAVED_ROWS


def quantized_matmul(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype; see native.py, errors too."""
    check_arguments(x, weight, bias)
    return _run(x, weight, bias)


def _forward(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if library.missing() is not None:  # an exported program on a machine without a compiler
        return aten._forward(x, weight, bias)
    return run(x, weight, bias, library.BEST)


def run(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, level: int) -> torch.Tensor:
    """x (M, K), in a dtype of `DTYPES`; level: see library.LEVELS."""
    data = weight.data if weight.data.stride(1) == 1 else weight.data.contiguous()
    zero = _NO_ZERO if weight.zero is None else weight.zero.contiguous()
    if bias is None:
        bias = _NO_BIAS
    elif bias.dtype not in DTYPES or bias.stride(0) != 1:
        bias = bias.to(x.dtype if bias.dtype in DTYPES else torch.float32).contiguous()
    scale, number = weight.scale.contiguous(), NUMBERS[weight.format]
    return torch.ops.easytorch_cpu.quantized_matmul.default(
        x, data, scale, zero, bias, number, weight.shape[1], weight.group_size, level
    )


_run = operators.define("cpu", _forward, aten._input_grad)
