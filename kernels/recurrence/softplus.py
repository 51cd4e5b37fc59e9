"""softplus, of which decays and steps are made."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), as `torch.nn.functional.softplus`, whose backward torch.compile traces with other strides.

    torch 2.13 takes the gradient of x to be laid out as x, where `softplus_backward` lays it out as the gradient of the
    output, so that a later view of it fails. By the change of shape that gradient is contiguous, as x is.
    """
    if not torch.compiler.is_compiling():
        return F.softplus(x)
    return F.softplus(x.contiguous()).flatten().unflatten(0, x.shape)
