"""Root mean square layer normalization, https://arxiv.org/abs/1910.07467."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """(..., N), weight (N,) -> (..., N): x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Normalized in float32 (float64 for float64), rounded to x's dtype and then multiplied by the weight, as the Llama
    modules do; a wider weight widens the result.
    """
    check_tensors(x, weight)
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    normalized = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
    return normalized if weight is None else weight * normalized


def check_tensors(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    """`ValueError` for an x that is not floating or has no dimension, and for a weight that is not (N,)."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"rms_norm takes a floating tensor (..., N), got shape {tuple(x.shape)} of {x.dtype}")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1]):
        raise ValueError(f"rms_norm: weight must be {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
