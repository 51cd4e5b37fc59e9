"""Telling whether a tensor still is what was put on a device."""

from __future__ import annotations

import torch


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when the tensor is written to or given other memory."""
    return (0 if tensor.is_inference() else tensor._version), tensor.data_ptr()
