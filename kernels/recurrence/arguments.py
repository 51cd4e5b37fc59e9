"""Argument checks and conversions of all operations with a state."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.arguments import check_tensors, floating


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the computation and of the state: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_sequence(operation: str, name: str, x: torch.Tensor, layout: str) -> None:
    """An error unless x is floating, has the dimensions `layout` ("B, T, C") names and at least one token."""
    check_tensors(operation, **{name: x})
    if x.dim() != layout.count(",") + 1 or not floating(x):
        raise ValueError(f"{operation} takes a floating {name} ({layout}), got shape {tuple(x.shape)} of {x.dtype}")
    if x.shape[1] == 0:
        raise ValueError(f"{operation} takes at least one token, got {name} {tuple(x.shape)}")


def check_shapes(operation: str, **expected: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """`ValueError` for a tensor whose shape is not the expected one, or that is not floating; None is absent.

    The caller has checked by `check_tensors` that all are on one device.
    """
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{operation}: {name} must be {shape}, got {tuple(tensor.shape)}")
        if not floating(tensor):
            raise ValueError(f"{operation}: {name} must be floating, got {tensor.dtype}")


def check_segments(operation: str, segment_ids: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """`ValueError` unless segment_ids is absent, or integers of shape (B, T)."""
    if segment_ids is None:
        return
    kind = segment_ids.dtype
    if segment_ids.shape != shape or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ValueError(
            f"{operation}: segment_ids must be integers {shape}, got {tuple(segment_ids.shape)} of {segment_ids.dtype}"
        )
