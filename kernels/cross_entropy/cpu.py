"""The losses of rows of logits and their gradient by the C++ operator: a row is read from memory and written once."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import DTYPES
from easytorch.kernels.interop.torch_func import eager

_NONE = torch.empty(0)


def takes(logits: Tensor) -> bool:
    """Whether `step` may be called with these logits (N, V): the calls of torch's own step are left to it otherwise."""
    return (
        logits.is_cpu
        and logits.dtype in DTYPES
        and logits.dim() == 2
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
        and eager()
        and torch._C._get_tracing_state() is None
        and library.missing() is None
    )


def step(
    logits: Tensor, labels: Tensor, losses_grad: Tensor | None, ignore_index: int, label_smoothing: float,
    softcap: float | None, z_loss: float, level: int = library.BEST,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """chunk.py's, of logits that `takes` takes: computed in float32, the sums over the vocabulary in float64."""
    upstream = _NONE if losses_grad is None else losses_grad.to(torch.float32).contiguous()
    losses: Tensor = torch.ops.easytorch_cpu.cross_entropy_rows.default(
        logits.detach(),
        labels.to(torch.int64).contiguous(),
        upstream,
        ignore_index,
        label_smoothing,
        softcap,
        z_loss,
        level,
    )
    return losses, None if losses_grad is None else logits
