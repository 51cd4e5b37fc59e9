"""Root mean square normalization by ATen."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.rms_norm.native import check_tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """The definition's result, bit for bit: ATen rounds to x's dtype before the weight only when it is not given it."""
    check_tensors(x, weight)
    normalized = F.rms_norm(x, x.shape[-1:], None, eps)
    return normalized if weight is None else weight * normalized
