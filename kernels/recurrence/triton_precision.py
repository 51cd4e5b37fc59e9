"""The precision of matrix products in the recurrences' Triton kernels. Does not import Triton."""

from __future__ import annotations

import torch


def precision(dtype: torch.dtype) -> str:
    """The `input_precision` of tl.dot for tokens of `dtype`; the operands are float32.

    tf32x3 for float32 tokens, unless `torch.set_float32_matmul_precision` is below "highest"; tf32 for 16-bit tokens,
    whose own rounding is coarser: their state is then accurate to 1e-3.
    """
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
