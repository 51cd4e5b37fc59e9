"""Cross entropy by the C++ operator: a row of logits is read from memory once, and its gradient written once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import DTYPES, last_dim_contiguous, other_dtype, refusal
from easytorch.kernels.cross_entropy import native
from easytorch.kernels.cross_entropy.native import check_arguments, check_logits, reduce
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import batched_by_autograd, transforming, untraced

_NONE = torch.empty(0)
# The fewest logits, and the smallest vocabulary, that it is chosen for. Loss and gradient over ATen's, one thread of a
# busy EPYC (Zen 4), float32 / bfloat16: (16, 8192) 1.50 / 1.16, (512, 32000) 0.45 / 0.15.
SMALLEST, SMALLEST_VOCABULARY = 2**20, 256


def takes(logits: Tensor) -> bool:
    """Whether `step` may be called with these logits (N, V), which it overwrites."""
    return (
        logits.is_cpu
        and logits.dtype in DTYPES
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
        and untraced()
        and library.missing() is None
    )


def step(
    logits: Tensor, labels: Tensor, losses_grad: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float | None, z_loss: float, level: int = library.BEST,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """chunk.py's, of logits that `takes` takes: computed in float32, the sums over the vocabulary in float64."""
    upstream = _NONE if losses_grad is None else losses_grad.to(torch.float32).contiguous()
    losses: Tensor = torch.ops.easytorch_cpu.cross_entropy_rows.default(
        logits.detach(), labels.to(torch.int64).contiguous(), upstream, ignore_index, label_smoothing, softcap, z_loss,
        level,
    )  # fmt: skip
    return losses, None if losses_grad is None else logits


def supports(logits: Tensor, labels: Tensor) -> str | None:
    """None when `cross_entropy` takes this call, else the reason. The first call may build the library."""
    if logits.dtype not in DTYPES:
        return other_dtype(logits.dtype)
    return refusal((logits, labels), gradients=True)


def prefers(logits: Tensor, labels: Tensor, **options: Any) -> bool:
    """True where it is faster than ATen: measured on CPUs with AVX2 and more."""
    large = logits.numel() >= SMALLEST and logits.shape[-1] >= SMALLEST_VOCABULARY
    return large and processor.AVX2 and logits.is_cpu


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """logits (..., V), labels (...) -> the definition's loss, float32.

    Raises `NotImplementedError` with the reason where `supports` gives one, errors for arguments that do not fit.
    """
    check_arguments(logits.shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_logits(logits, labels)
    if (reason := supports(logits, labels)) is not None:
        raise NotImplementedError(reason)
    rows = last_dim_contiguous(logits.reshape(labels.numel(), logits.shape[-1]))
    losses: Tensor = _Losses.apply(rows, labels.reshape(-1), (ignore_index, label_smoothing, softcap, z_loss))
    return reduce(losses.reshape(labels.shape), labels, ignore_index, reduction)


class _Losses(torch.autograd.Function):
    """The loss of each row, which keeps the logits alone; gradients of every order, after the first the
    definition's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.settings = settings
        return step(logits, labels, None, *settings)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled() or transforming() or batched_by_autograd(grad):

            def definition(given: Tensor) -> Tensor:
                names = ("ignore_index", "label_smoothing", "softcap", "z_loss")
                settings = dict(zip(names, ctx.settings, strict=True))
                return native.cross_entropy(given, labels, **settings, reduction="none")

            return *by_definition(definition, (logits,), ctx.needs_input_grad[:1], grad), None, None
        copy = logits.clone(memory_format=torch.contiguous_format)
        return step(copy, labels, grad, *ctx.settings)[1], None, None
