"""Root mean square layer normalization, https://arxiv.org/abs/1910.07467."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.arguments import FLOATS, check_eps, together
from easytorch.kernels.interop.arguments import check_tensors as check_devices


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """(..., N), weight (N,) -> (..., N): x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Normalized in float32 (float64 for float64), rounded to x's dtype and then multiplied by the weight, as the Llama
    modules do; a wider weight widens the result.
    """
    check_tensors(x, weight, eps)
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    normalized = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
    return normalized if weight is None else weight * normalized


def check_tensors(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """An error for an x that is not floating or has no dimension, a weight that is not (N,), an eps below 0."""
    if weight is not None and not together(x, weight):
        check_devices("rms_norm", x=x, weight=weight)
    check_eps("rms_norm", eps)
    if x.dim() == 0 or x.dtype not in FLOATS:
        raise ValueError(f"rms_norm takes a floating x (..., N), got shape {tuple(x.shape)} of {x.dtype}")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1]):
        raise ValueError(f"rms_norm: weight must be {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    if weight is not None and weight.dtype not in FLOATS:
        raise ValueError(f"rms_norm: weight must be floating, got {weight.dtype}")
