"""Matrix products of states stay as wide as their operands, under autocast too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves the operations on x's device alone."""
    device = x.device.type
    # the meta device has no autocast to ask about
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
