"""The limits of the Triton norms. Does not import Triton."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.triton_devices import DTYPES, refusal

# A row stays in registers: 16 warps hold 16384 float32 numbers four times over, the backward of layer norm needs that.
MAX_WIDTH = 16384


def supports(x: torch.Tensor, *vectors: torch.Tensor | None, dtype: torch.dtype | None = None) -> str | None:
    """None when the Triton norms take x (..., N) as `dtype` (None: its own) with these vectors, else the reason."""
    if x.dim() > 0 and x.shape[-1] > MAX_WIDTH:
        return f"a row must fit the registers, at most {MAX_WIDTH} wide, got {x.shape[-1]}"
    for vector in vectors:
        if vector is not None and vector.dtype not in DTYPES:
            return f"its weights are float32, float16 or bfloat16, got {vector.dtype}"
    return refusal(x.device, dtype or x.dtype)
