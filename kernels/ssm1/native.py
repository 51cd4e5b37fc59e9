"""The selective scan of Mamba: https://arxiv.org/abs/2312.00752, algorithm 2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import check_tensors
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import check_segments, check_sequence, check_shapes, wide_dtype
from easytorch.kernels.recurrence.softplus import softplus


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
    """x, dt, z (B, T, C), A (C, N), B, C (B, T, N), D, dt_bias (C,), initial_state (B, C, N) -> outputs (B, T, C),
    final_state (B, C, N).

    With dt = softplus(dt + dt_bias) (dt_softplus; else their sum), token by token:
        state = exp(dt * A) * state + dt * x * B,    output = (sum over N of state * C + D * x) * silu(z).
    The first state is initial_state, zeros where it is None; segment_ids (B, T), integers: it is zeros again wherever a
    token's id is not that of the token before it.

    Computed in float32 (float64 for a float64 x), the dtype of final_state; outputs are rounded once, to x's dtype.
    """
    check_arguments(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids)
    wide = wide_dtype(x)
    step = time_step(dt, dt_bias, dt_softplus, wide)
    tokens, A, B, C = (tensor.to(wide) for tensor in (x, A, B, C))
    kept = None if segment_ids is None else ~documents.first_tokens(segment_ids)
    state = first_state(x, A, initial_state)
    outputs = []
    for t in range(x.shape[1]):
        if kept is not None:
            state = state * kept[:, t, None, None]
        decay = torch.exp(step[:, t].unsqueeze(2) * A)
        state = decay * state + (step[:, t] * tokens[:, t]).unsqueeze(2) * B[:, t].unsqueeze(1)
        outputs.append((state * C[:, t].unsqueeze(1)).sum(2))
    return finish(torch.stack(outputs, 1), x, D, z), state


def time_step(dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, wide: torch.dtype) -> torch.Tensor:
    """softplus(dt + dt_bias), or the sum alone, in the dtype `wide`."""
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    return softplus(dt) if dt_softplus else dt


def first_state(x: torch.Tensor, A: torch.Tensor, initial_state: torch.Tensor | None) -> torch.Tensor:
    """initial_state, or zeros (B, C, N), in the wide dtype."""
    if initial_state is not None:
        return initial_state.to(wide_dtype(x))
    return torch.zeros(x.shape[0], *A.shape, dtype=wide_dtype(x), device=x.device)


def finish(scanned: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    """(scanned + D * x) * silu(z) in x's dtype; D broadcasts over x."""
    if D is not None:
        scanned = scanned + D.to(scanned.dtype) * x.to(scanned.dtype)
    if z is not None:
        scanned = scanned * F.silu(z.to(scanned.dtype))
    return scanned.to(x.dtype)


def check_arguments(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
) -> None:  # fmt: skip
    """An error for tensors that do not fit the definition."""
    check_tensors(
        "ssm1", x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state,
        segment_ids=segment_ids,
    )  # fmt: skip
    check_sequence("ssm1", "x", x, "B, T, C")
    batch, length, channels = x.shape
    if A.dim() != 2 or A.shape[0] != channels:
        raise ValueError(f"ssm1: A must be ({channels}, N), got {tuple(A.shape)}")
    full, vector, size = tuple(x.shape), (channels,), A.shape[1]
    check_shapes(
        "ssm1", dt=(dt, full), A=(A, (channels, size)), B=(B, (batch, length, size)), C=(C, (batch, length, size)),
        D=(D, vector), z=(z, full), dt_bias=(dt_bias, vector),
        initial_state=(initial_state, (batch, channels, size)),
    )  # fmt: skip
    check_segments("ssm1", segment_ids, (batch, length))
