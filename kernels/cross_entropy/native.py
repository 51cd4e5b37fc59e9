"""Softmax cross entropy over a vocabulary, of logits and of the linear layer before them.

Label smoothing: https://arxiv.org/abs/1512.00567. Soft cap: https://arxiv.org/abs/2408.00118. z-loss:
https://arxiv.org/abs/2204.02311.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import bounds, check_int64, check_number, check_tensors, described, floating

REDUCTIONS = ("mean", "sum", "none")


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
    """logits (..., V), labels (...) of int32 or int64 -> the loss, float32 (float64 for float64 logits).

    With z = softcap * tanh(logits / softcap) and lse = logsumexp(z), the loss of a row is
    lse - (1 - label_smoothing) * z[label] - label_smoothing * mean(z) + z_loss * lse^2, computed in the loss's dtype.
    Rows labelled `ignore_index` have loss 0. reduction: "mean" over the other rows (0 where there is none), "sum", or
    "none", the shape of the labels. Raises an error for what `check_arguments` refuses.
    """
    check_arguments(logits.shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_logits(logits, labels)
    z = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    ignored = labels == ignore_index
    # above a row's largest logit: the logarithm of a sum beside a logit of 1e6 would be rounded away
    largest = z.detach().amax(dim=-1, keepdim=True)
    origin = torch.where(largest.isinf(), 0.0, largest)
    z = z - origin
    log_sum = torch.logsumexp(z, dim=-1)
    at = torch.where(ignored, 0, labels).to(torch.int64)
    losses = log_sum - (1.0 - label_smoothing) * _entries(z, at)
    if label_smoothing:
        losses = losses - label_smoothing * z.mean(dim=-1)
    if z_loss:
        losses = losses + z_loss * (log_sum + origin.squeeze(-1)).square()
    return reduce(losses.masked_fill(ignored, 0.0), labels, ignore_index, reduction)


def _entries(z: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """z (..., V), at (...) -> z[..., at]."""
    if z.device.type != "xla":
        return z.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    # XLA stores z in memory to gather from it, 2 GB for 4096 rows of 128256; a sum is fused with what made it
    here = torch.arange(z.shape[-1], device=z.device) == at.unsqueeze(-1)
    return torch.where(here, z, 0.0).sum(dim=-1)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """hidden (..., D), weight (V, D), bias (V,), labels (...): `cross_entropy` of hidden @ weight.T + bias."""
    check_linear(hidden, weight, bias, labels)
    return cross_entropy(
        F.linear(hidden, weight, bias), labels, ignore_index=ignore_index, label_smoothing=label_smoothing,
        softcap=softcap, z_loss=z_loss, reduction=reduction,
    )  # fmt: skip


def reduce(losses: torch.Tensor, labels: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """`reduction` of the losses of rows, of which those that are ignored are 0."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted(labels, ignore_index)


def counted(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """How many labels are not `ignore_index`; 1 where there is none, so that a batch of nothing loses 0, not NaN."""
    return (labels != ignore_index).sum().clamp(min=1)


def check_logits(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """An error for logits that are not floating, or elsewhere than the labels."""
    check_tensors("cross_entropy", logits=logits, labels=labels)
    if not floating(logits):
        raise ValueError(f"cross_entropy takes floating logits, got {logits.dtype}")


def check_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> None:
    """An error unless hidden (..., D), weight (V, D) and bias (V,) fit and are floating, of one dtype."""
    check_tensors("fused_linear_cross_entropy", hidden=hidden, weight=weight, bias=bias, labels=labels)
    fits = weight.dim() == 2 and hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        given = "no bias" if bias is None else f"bias {tuple(bias.shape)}"
        raise ValueError(
            f"fused_linear_cross_entropy takes hidden (..., D), weight (V, D) and bias (V,), got hidden "
            f"{tuple(hidden.shape)}, weight {tuple(weight.shape)} and {given}"
        )
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not floating(hidden):
        raise ValueError(
            f"fused_linear_cross_entropy: hidden, weight and bias must be floating, of one dtype, got "
            f"{', '.join(sorted(map(str, dtypes)))}; cast them, or call it under autocast"
        )


def check_arguments(
    shape: torch.Size | tuple[int, ...], labels: torch.Tensor, label_smoothing: float, softcap: float | None,
    z_loss: float, reduction: str, ignore_index: int,
) -> None:  # fmt: skip
    """An error for what does not fit logits of `shape` (..., V), or is out of its range.

    That a label is in 0..V-1, or `ignore_index`, is checked where labels are at hand (`interop/arguments.py`).
    """
    check_tensors("cross_entropy", labels=labels)
    if (
        len(shape) == 0
        or shape[-1] == 0
        or labels.shape != shape[:-1]
        or labels.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"cross_entropy takes logits (..., V), V at least 1, and labels (...) of int32 or int64, got logits "
            f"{tuple(shape)} and labels {tuple(labels.shape)} of {labels.dtype}"
        )
    for name, number in (("label_smoothing", label_smoothing), ("softcap", softcap), ("z_loss", z_loss)):
        if number is None and name != "softcap":
            raise TypeError(f"cross_entropy: {name} must be a number, got None")
        check_number("cross_entropy", name, number)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"cross_entropy: softcap must be positive and finite, or None for no cap, got {softcap}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"cross_entropy: z_loss must not be negative, nor infinite, got {z_loss}")
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction must be one of {', '.join(REDUCTIONS)}, got {described(reduction)}")
    check_int64("cross_entropy", "ignore_index", 0.0 if ignore_index is None else ignore_index)
    limits = bounds(labels)
    if limits is not None and not 0 <= limits[0] <= limits[1] < shape[-1]:
        limits = bounds(labels[labels != ignore_index])
        if limits is not None and not 0 <= limits[0] <= limits[1] < shape[-1]:
            raise ValueError(
                f"cross_entropy: labels must be in 0..{shape[-1] - 1} or ignore_index = {ignore_index}, got "
                f"{limits[0]} to {limits[1]}"
            )
