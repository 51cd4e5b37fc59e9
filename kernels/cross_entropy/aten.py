"""Softmax cross entropy by ATen."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from easytorch.kernels.cross_entropy.native import check_arguments, check_logits, reduce
from easytorch.kernels.interop.torch_func import eager

_WIDE = (torch.float32, torch.float64)


def supports(softcap: float | None, z_loss: float | None) -> str | None:
    """None when ATen has what the call asks for, else the reason why not."""
    if softcap is not None:
        return "ATen has no softcap"
    return "ATen has no z_loss" if z_loss is not None and not _is_zero(z_loss) else None


def _is_zero(number: Any) -> bool:
    """False for what is no number, which the definition refuses."""
    return isinstance(number, int | float) and number == 0


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """logits (..., V), labels (...) -> the definition's loss; the log-softmax is taken in float32 at least.

    Raises `ValueError` for what `supports` refuses, and for arguments that do not fit.
    """
    check_arguments(logits.shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    reason = supports(softcap, z_loss)
    if reason is not None:
        raise ValueError(f"cross_entropy: {reason}")
    check_logits(logits, labels)
    wide = logits if logits.dtype in _WIDE else logits.to(torch.float32)
    if labels.dim() != 1:
        wide = wide.reshape(-1, logits.shape[-1])
    flat = labels.reshape(-1).to(torch.int64)
    if reduction == "mean" and not label_smoothing and labels.is_cpu and eager():
        # ATen's own mean, a third of the calls, is NaN where every row is ignored; with smoothing it counts those too
        loss = F.cross_entropy(wide, flat, ignore_index=ignore_index)
        if not math.isnan(loss.item()):
            return loss
    losses = F.cross_entropy(
        wide, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )  # fmt: skip
    return reduce(losses.reshape(labels.shape), labels, ignore_index, reduction)
