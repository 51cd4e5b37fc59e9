"""Matrix products of states in the dtype of their operands, under autocast too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """A context that disables autocast on x's device."""
    device = x.device.type
    # the meta device has no autocast
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
