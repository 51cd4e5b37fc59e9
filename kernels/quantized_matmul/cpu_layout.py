"""The layout of a quantized weight's codes that the C++ products of few rows read fastest, made and undone.

interleaved.py defines it. Rows one after another take about three times the instructions, which bound products of 4
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.interop.torch_func import eager
from easytorch.kernels.quantized_matmul import interleaved

# The format's number in cpu_product.h.
FORMATS = {"int8": 0, "int4": 1, "nf4": 2, "fp8_e4m3fn": 3, "fp8_e5m2": 4, "fp4_e2m1": 5}
BLOCK_FORMATS = {
    "q8_0": 6, "q4_0": 7, "q4_k": 8, "q6_k": 9, "q4_1": 10, "q5_0": 11, "q5_1": 12, "iq4_nl": 13, "q2_k": 14,
    "q3_k": 15, "q5_k": 16, "iq4_xs": 17,
}  # fmt: skip
NUMBERS = FORMATS | BLOCK_FORMATS


def interleave(codes: Tensor, format: str, columns: int, group_size: int) -> Tensor | None:
    """codes (N, bytes of a row) -> the same interleaved; None where no product on this machine would gain by it.

    group_size: columns that share a scale. It may build the library.
    """
    width = codes.shape[1]
    if not interleaved.interleaves(format, codes.shape[0], columns) or group_size % 32 or library.missing() is not None:
        return None
    made: Tensor = torch.ops.easytorch_cpu.interleave_codes.default(
        codes.contiguous(), NUMBERS[format], columns, group_size, False, library.BEST
    )
    return made if made.shape[1] == interleaved.ROWS * width else None


def separate(codes: Tensor, format: str, columns: int) -> Tensor:
    """The inverse, by the library where it is there."""
    if codes.is_cpu and codes.is_contiguous() and eager() and library.missing() is None:
        found: Tensor = torch.ops.easytorch_cpu.interleave_codes.default(
            codes, NUMBERS[format], columns, 32, True, library.BEST
        )
        return found
    return interleaved.separate(codes, format)
