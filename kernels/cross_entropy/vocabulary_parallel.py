"""The cross entropy of a linear layer whose weight is sharded by the vocabulary over the ranks of a process group.

Each rank computes the logits of its own part of the vocabulary, a chunk of rows at a time, and of each row sends four
numbers: the largest logit, the sum of exponentials above it, the label's logit and the sum of the logits. No rank has
all logits or the full weight (Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from easytorch.kernels.cross_entropy import chunk
from easytorch.kernels.cross_entropy.fused_linear import Step, default_chunk_size, over_chunks
from easytorch.kernels.cross_entropy.native import check_arguments, check_linear, counted
from easytorch.kernels.interop.arguments import check_int64


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """hidden (..., D) and labels (...), the same on every rank, weight (V / n, D), bias (V / n,) -> the loss.

    `native.linear_cross_entropy` of the full weight defines it; the value is the same on every rank. The gradient of
    hidden is summed over the ranks, those of weight and bias are of the rank's own part. first: the first class of the
    rank's part. vocabulary: V. Differentiable once. Raises `ValueError` for what does not fit. Every rank of the group
    makes the same call, and its backward.
    """
    check_linear(hidden, weight, bias, labels)
    shape = (*hidden.shape[:-1], vocabulary)
    check_arguments(shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_int64("cross_entropy", "chunk_size", chunk_size)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, or None to choose, got {chunk_size}")
    rows, flat = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1)
    call = _Call(
        settings=chunk.Settings(ignore_index, label_smoothing, softcap, z_loss),
        step=functools.partial(_step, group=group, first=first, vocabulary=vocabulary),
        chunk_size=default_chunk_size(weight.shape[0], weight.device) if chunk_size is None else chunk_size,
        group=group,
    )
    if reduction == "none":
        losses: Tensor = _Losses.apply(rows, weight, bias, flat, call)
        return losses.reshape(labels.shape)
    total: Tensor = _Sum.apply(rows, weight, bias, flat, call)
    return total if reduction == "sum" else total / counted(labels, ignore_index)


class _Call(NamedTuple):
    settings: chunk.Settings
    step: Step
    chunk_size: int
    group: dist.ProcessGroup

    def gradients(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, losses_grad: Tensor | None,
        wanted: list[bool],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The losses (N,), and the gradients that are wanted, else empty, that of hidden summed over the ranks."""
        losses, *grads = over_chunks(
            hidden, weight, bias, labels, losses_grad, self.settings, self.chunk_size, self.step, wanted
        )
        if wanted[0]:
            dist.all_reduce(grads[0], group=self.group)
        return losses, grads


class _Sum(torch.autograd.Function):
    """The sum of the losses, with its gradients computed in the same pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call) -> Tensor:
        wanted = list(ctx.needs_input_grad[:3])
        ones = torch.ones((), device=hidden.device).expand(labels.shape) if any(wanted) else None
        losses, grads = call.gradients(hidden, weight, bias, labels, ones, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtype = hidden.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_given(ctx, [grad * total_grad for grad in ctx.saved_tensors]), None, None


class _Losses(torch.autograd.Function):
    """The loss of each row; the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.call, ctx.dtype = call, hidden.dtype
        return call.gradients(hidden, weight, bias, labels, None, [False] * 3)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, losses_grad: Tensor) -> tuple[Tensor | None, ...]:
        _, grads = ctx.call.gradients(*ctx.saved_tensors, losses_grad, list(ctx.needs_input_grad[:3]))
        return *_given(ctx, grads), None, None


def _given(ctx: Any, grads: list[Tensor]) -> list[Tensor | None]:
    return [grad.to(ctx.dtype) if n else None for grad, n in zip(grads, ctx.needs_input_grad, strict=False)]


def _step(
    logits: Tensor, labels: Tensor, losses_grad: Tensor | None, settings: chunk.Settings, *, group: dist.ProcessGroup,
    first: int, vocabulary: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`chunk.step` of the logits (n, V / n) of the classes from `first` on."""
    smoothing, z_loss, dtype, width = settings.label_smoothing, settings.z_loss, logits.dtype, logits.shape[1]
    z, slope = chunk.capped(logits, settings.softcap, with_slope=losses_grad is not None)
    ignored = labels == settings.ignore_index
    place = labels.to(torch.int64) - first
    here = (place >= 0) & (place < width) & ~ignored
    at = torch.where(here, place, 0).unsqueeze(1)
    own = z.amax(dim=1)
    picked = torch.where(here, z.gather(1, at).squeeze(1), 0.0)
    z = z.sub_(own.unsqueeze(1))
    below = z.sum(dim=1) if smoothing else torch.zeros_like(own)
    z = z.exp_()
    parts = _gathered(torch.stack([own, z.sum(dim=1), picked, below]), group)
    largest = parts[:, 0].amax(dim=0)
    total = (parts[:, 1] * torch.exp(parts[:, 0] - largest)).sum(dim=0)
    # each term above the largest logit: the logarithm of a sum beside a logit of 1e6 would be rounded away
    losses = total.log() - (1.0 - smoothing) * (parts[:, 2].sum(dim=0) - largest)
    if smoothing:
        # the ranks have equally many classes
        mean = (parts[:, 3] / width + (parts[:, 0] - largest)).mean(dim=0)
        losses = losses - smoothing * mean
    lse = largest + total.log()
    if z_loss:
        losses = losses + z_loss * lse.square()
    losses = losses.masked_fill(ignored, 0.0)
    if losses_grad is None:
        return losses, None
    scale = losses_grad.to(z.dtype).masked_fill(ignored, 0.0)
    grad = z.mul_((scale * (1.0 + 2.0 * z_loss * lse) * torch.exp(own - largest) / total).unsqueeze(1))
    if smoothing:
        grad = grad.sub_((scale * (smoothing / vocabulary)).unsqueeze(1))
    grad = grad.scatter_add_(1, at, torch.where(here, scale * (smoothing - 1.0), 0.0).unsqueeze(1))
    if slope is not None:
        grad = grad.mul_(slope)
    return losses, grad.to(dtype)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(4, n) -> (ranks, 4, n)"""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)
