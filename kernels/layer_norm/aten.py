"""Layer normalization by ATen, which normalizes in float32 and rounds once, as the definition does."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.layer_norm.native import check_tensors


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """The definition's result to the last bit or two of x's dtype, in every mixture of dtypes.

    On the CPU ATen sums the gradients of a 16-bit call's weight and bias in 16 bits: 0.5% off at 4096 rows of float16,
    5% of bfloat16 (torch 2.13). Where those are wanted, 16 bits go through float32.
    """
    check_tensors(x, weight, bias)
    vectors = [vector for vector in (weight, bias) if vector is not None]
    learning = torch.is_grad_enabled() and any(vector.requires_grad for vector in vectors)
    if not learning and all(vector.dtype == x.dtype for vector in vectors):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias = (None if vector is None else vector.to(wide) for vector in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)
