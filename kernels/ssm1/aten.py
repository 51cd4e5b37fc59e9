"""The selective scan by ATen: blocks of tokens, or all at once where they are few."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.torch_func import transforming
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import wide_dtype
from easytorch.kernels.recurrence.precision import without_autocast
from easytorch.kernels.ssm1.native import check_arguments, finish, first_state, time_step
from easytorch.kernels.ssm1.scan import Scan, scan

# Tokens up to which the custom operator costs more than it saves.
SHORT = 16


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
    """`native.ssm1` by ATen: the same shapes, dtypes and errors. Not differentiable twice."""
    check_arguments(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids)
    wide = wide_dtype(x)
    step = time_step(dt, dt_bias, dt_softplus, wide)
    tokens, A, B, C = (tensor.to(wide) for tensor in (x, A, B, C))
    state = first_state(x, A, initial_state)
    first = None if segment_ids is None else documents.first_tokens(segment_ids)
    if x.shape[1] <= SHORT:
        with without_autocast(x):
            outputs, last = _short(step, tokens, A, B, C, state, first)
            return finish(outputs, x, D, z), last
    run = Scan.apply if transforming() else scan
    outputs, last, _ = run(step, tokens, A.t().unsqueeze(0), B, C, state.transpose(1, 2), first)
    return finish(outputs, x, D, z), last.transpose(1, 2)


def _short(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """All tokens at once except for one multiply-add each, in the state's own layout (B, C, N)."""
    if x.shape[1] == 1:
        decay = torch.exp(step.transpose(1, 2) * A)
        state = torch.addcmul((step * x).transpose(1, 2) * B, decay, state)
        return (state @ C.transpose(1, 2)).transpose(1, 2), state
    decay = torch.exp(step.unsqueeze(3) * A)
    if first is not None:
        decay = decay.masked_fill(first[..., None, None], 0.0)
    given = (step * x).unsqueeze(3) * B.unsqueeze(2)
    states = []
    for new, factor in zip(given.unbind(1), decay.unbind(1), strict=True):
        state = torch.addcmul(new, factor, state)
        states.append(state)
    return (torch.stack(states, 1) @ C.unsqueeze(3)).squeeze(3), state
