"""One chunk of rows of the fused linear cross entropy: the losses, and the gradient of the logits in their place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.cross_entropy import cpu


class Settings(NamedTuple):
    """The arguments of a loss other than logits and labels; see native.py."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float


# Logits that are widened at once on a CPU: 2 MiB of float32, which stay in a core's cache from one pass to the next.
LOGITS_IN_CACHE = 2**19


def step(
    logits: torch.Tensor, labels: torch.Tensor, losses_grad: torch.Tensor | None, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits (n, V), which are overwritten, labels and losses_grad (n,) -> losses (n,), the gradient of the logits.

    The gradient has the logits' dtype, and is None without `losses_grad`; all is computed in float32 (float64 for
    float64), on a CPU a few rows at a time.
    """
    if cpu.takes(logits):
        return cpu.step(logits, labels, losses_grad, *settings)
    if logits.device.type != "cpu":
        return _step(logits, labels, losses_grad, settings)
    rows, losses = max(1, LOGITS_IN_CACHE // logits.shape[1]), []
    for start in range(0, max(logits.shape[0], 1), rows):
        part = slice(start, start + rows)
        upstream = None if losses_grad is None else losses_grad[part]
        loss, grad = _step(logits[part], labels[part], upstream, settings)
        losses.append(loss)
        if grad is not None and grad.dtype != torch.promote_types(grad.dtype, torch.float32):
            logits[part] = grad  # a wider dtype was overwritten in place
    return torch.cat(losses), None if losses_grad is None else logits


def _step(
    logits: torch.Tensor, labels: torch.Tensor, losses_grad: torch.Tensor | None, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All rows at once, in one buffer, and a second one for the slope of the soft cap."""
    smoothing, z_loss, dtype = settings.label_smoothing, settings.z_loss, logits.dtype
    z, slope = capped(logits, settings.softcap, with_slope=losses_grad is not None)
    ignored = labels == settings.ignore_index
    at = torch.where(ignored, 0, labels).to(torch.int64).unsqueeze(1)
    picked, largest = z.gather(1, at).squeeze(1), z.amax(dim=1, keepdim=True)
    z = z.sub_(largest)
    mean = z.mean(dim=1) if smoothing else None
    z = z.exp_()
    total = z.sum(dim=1, keepdim=True)
    # each term above the largest logit: the logarithm of a sum beside a logit of 1e6 would be rounded away
    losses = total.log().squeeze(1) - (1.0 - smoothing) * (picked - largest.squeeze(1))
    if mean is not None:
        losses = losses - smoothing * mean
    lse = (largest + total.log()).squeeze(1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    losses = losses.masked_fill(ignored, 0.0)
    if losses_grad is None:
        return losses, None
    scale = losses_grad.to(z.dtype).masked_fill(ignored, 0.0).unsqueeze(1)
    grad = z.mul_(scale * (1.0 + 2.0 * z_loss * lse.unsqueeze(1)) / total)
    if smoothing:
        grad = grad.sub_(scale * (smoothing / z.shape[1]))
    grad = grad.scatter_add_(1, at, scale * (smoothing - 1.0))
    if slope is not None:
        grad = grad.mul_(slope)
    return losses, grad.to(dtype)


def capped(
    logits: torch.Tensor, softcap: float | None, *, with_slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits in float32 (float64 stays) with the soft cap, and its slope or None; in place where they can be."""
    z, slope = logits if logits.dtype == torch.float64 else logits.to(torch.float32), None
    if softcap is not None:
        z = z.div_(softcap).tanh_()
        slope = 1.0 - z.square() if with_slope else None
        z = z.mul_(softcap)
    return z, slope
