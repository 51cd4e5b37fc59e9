"""Root mean square normalization by ATen."""

from __future__ import annotations

import torch

from easytorch.kernels.rms_norm.native import check_tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """The definition's result, bit for bit: in 16 bits ATen rounds before the weight only if the weight is applied
    separately."""
    check_tensors(x, weight, eps)
    if weight is None or (weight.dtype == x.dtype and x.dtype.itemsize > 2):
        return torch.rms_norm(x, x.shape[-1:], weight, eps)
    return weight * torch.rms_norm(x, x.shape[-1:], None, eps)
