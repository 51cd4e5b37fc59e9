"""jax_scan.py inside a torch_xla graph: one node forward, one backward."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient
from easytorch.kernels.recurrence import documents
from easytorch.kernels.ssm1 import aten, jax_scan
from easytorch.kernels.ssm1.native import check_arguments, finish, first_state, time_step


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
    """`native.ssm1` on the xla device, for any dtype but float64."""
    check_arguments(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids)
    if x.shape[1] == 1:
        return aten.ssm1(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, segment_ids)
    step = time_step(dt, dt_bias, dt_softplus, torch.float32)
    first = None if segment_ids is None else documents.first_tokens(segment_ids)
    state = first_state(x, A, initial_state).transpose(1, 2)
    outputs, last = call_jax_with_gradient(
        jax_scan.ssm1, jax_scan.ssm1_backward, step, x.float(), A.float().t(), B.float(), C.float(), state, first,
        outputs=2,
    )  # fmt: skip
    return finish(outputs, x, D, z), last.transpose(1, 2)
