"""The selective scan by ATen: blocks of tokens, and a step of its own for one token."""

from __future__ import annotations

import torch

from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import wide_dtype
from easytorch.kernels.recurrence.precision import without_autocast
from easytorch.kernels.ssm1.native import check_arguments, finish, first_state, time_step
from easytorch.kernels.ssm1.scan import Scan


def ssm1(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `native.ssm1` defines, with its shapes, dtypes and errors. Not differentiable twice."""
    check_arguments(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids)
    wide = wide_dtype(x)
    step = time_step(dt, dt_bias, dt_softplus, wide)
    tokens, A, B, C = (tensor.to(wide) for tensor in (x, A, B, C))
    state = first_state(x, A, initial_state)
    if x.shape[1] == 1:
        decay = torch.exp(step.transpose(1, 2) * A)
        state = torch.addcmul((step * tokens).transpose(1, 2) * B, decay, state)
        with without_autocast(x):
            return finish((state @ C.transpose(1, 2)).transpose(1, 2), x, D, z), state
    first = None if segment_ids is None else documents.first_tokens(segment_ids)
    outputs, last, _ = Scan.apply(step, tokens, A.t().unsqueeze(0), B, C, state.transpose(1, 2), first)
    return finish(outputs, x, D, z), last.transpose(1, 2)
