"""How the Triton kernels of recurrences multiply. Loads no Triton."""

from __future__ import annotations

import torch


def precision(dtype: torch.dtype) -> str:
    """The precision of the products for tokens of `dtype`, their operands float32.

    Three products of tf32 for float32 tokens, unless `torch.set_float32_matmul_precision` is below "highest"; one for
    16 bits, whose own rounding is coarser than its: their state is then good to 1e-3, not to float32.
    """
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
