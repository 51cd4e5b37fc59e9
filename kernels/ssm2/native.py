"""The scan of Mamba-2, with a scalar decay per head: https://arxiv.org/abs/2405.21060."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.interop.arguments import check_number, check_tensors, described
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import check_segments, check_sequence, check_shapes, wide_dtype
from easytorch.kernels.ssm1.native import finish
from easytorch.kernels.ssm1.native import time_step as unlimited_step

NO_LIMIT = (0.0, float("inf"))


class ScanDims(NamedTuple):
    """The dimensions B, T, H, P, G and N of a call."""

    batch: int
    length: int
    heads: int
    width: int
    groups: int
    state: int


def ssm2(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_state: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, z (B, T, H, P), dt (B, T, H), A (H,), B, C (B, T, G, N), D (H,) or (H, P), dt_bias (H,), initial_state
    (B, H, P, N) -> outputs (B, T, H, P), final_state (B, H, P, N). H is a multiple of G: H / G heads share a group.

    With dt = softplus(dt + dt_bias) (dt_softplus; else their sum), clamped to dt_limit, token by token:
        state = exp(dt * A) * state + dt * x B^T,    output = (state C + D * x) * silu(z).
    The first state is initial_state, zeros where it is None; segment_ids (B, T), integers: it is zeros again wherever a
    token's id is not that of the token before it.

    Computed in float32 (float64 for a float64 x), the dtype of final_state; outputs are rounded once, to x's dtype.
    """
    sizes = check_arguments(x, dt, A, B, C, D, z, dt_bias, dt_limit, initial_state, segment_ids)
    wide = wide_dtype(x)
    step = time_step(dt, dt_bias, dt_softplus, dt_limit, wide)
    decay = torch.exp(step * A.to(wide))
    if segment_ids is not None:
        decay = decay.masked_fill(documents.first_tokens(segment_ids).unsqueeze(2), 0.0)
    shared = sizes.heads // sizes.groups
    B, C = (tensor.to(wide).repeat_interleave(shared, 2).unsqueeze(3) for tensor in (B, C))  # (B, T, H, 1, N)
    given = (step.unsqueeze(3) * x.to(wide)).unsqueeze(4)
    state = first_state(x, sizes, initial_state)
    outputs = []
    for t in range(sizes.length):
        state = decay[:, t, :, None, None] * state + given[:, t] * B[:, t]
        outputs.append((state * C[:, t]).sum(3))
    return finish(torch.stack(outputs, 1), x, per_head(D), z), state


def time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], wide: torch.dtype
) -> torch.Tensor:
    """softplus(dt + dt_bias), or the sum alone, clamped to dt_limit, in the dtype `wide`."""
    return unlimited_step(dt, dt_bias, dt_softplus, wide).clamp(*dt_limit)


def per_head(D: torch.Tensor | None) -> torch.Tensor | None:
    """D, reshaped to (H, 1) or (H, P)."""
    return D.unsqueeze(1) if D is not None and D.dim() == 1 else D


def first_state(x: torch.Tensor, sizes: ScanDims, initial_state: torch.Tensor | None) -> torch.Tensor:
    """initial_state, or zeros (B, H, P, N), in the wide dtype."""
    if initial_state is not None:
        return initial_state.to(wide_dtype(x))
    shape = (sizes.batch, sizes.heads, sizes.width, sizes.state)
    return torch.zeros(shape, dtype=wide_dtype(x), device=x.device)


def check_arguments(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_limit: tuple[float, float],
    initial_state: torch.Tensor | None, segment_ids: torch.Tensor | None,
) -> ScanDims:  # fmt: skip
    """The dimensions of a call; an error for tensors and limits that do not fit the definition."""
    check_tensors(
        "ssm2", x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state,
        segment_ids=segment_ids,
    )  # fmt: skip
    check_sequence("ssm2", "x", x, "B, T, H, P")
    batch, length, heads, width = x.shape
    if B.dim() != 4 or B.shape[2] == 0 or heads % B.shape[2]:
        raise ValueError(f"ssm2: B must be ({batch}, {length}, G, N) with G a divisor of {heads}, got {tuple(B.shape)}")
    groups, size = B.shape[2:]
    shared = (batch, length, groups, size)
    D_shape = (heads,) if D is None or D.dim() == 1 else (heads, width)
    check_shapes(
        "ssm2", dt=(dt, (batch, length, heads)), A=(A, (heads,)), B=(B, shared), C=(C, shared), D=(D, D_shape),
        z=(z, tuple(x.shape)), dt_bias=(dt_bias, (heads,)),
        initial_state=(initial_state, (batch, heads, width, size)),
    )  # fmt: skip
    check_segments("ssm2", segment_ids, (batch, length))
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2 or None in dt_limit:
        raise TypeError(f"ssm2: dt_limit must be (least, greatest), got {described(dt_limit)}")
    for limit in dt_limit:
        check_number("ssm2", "dt_limit", limit)
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"ssm2: dt_limit must be (least, greatest), got {dt_limit}")
    return ScanDims(batch, length, heads, width, groups, size)
