"""jax_chunks.py inside a torch_xla graph: one node forward, one backward."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient
from easytorch.kernels.recurrence import documents
from easytorch.kernels.ssm1.native import finish
from easytorch.kernels.ssm2 import aten, jax_chunks
from easytorch.kernels.ssm2.native import NO_LIMIT, check_arguments, first_state, per_head, time_step


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
    """`native.ssm2` on the xla device, for any dtype but float64."""
    sizes = check_arguments(x, dt, A, B, C, D, z, dt_bias, dt_limit, initial_state, segment_ids)
    if sizes.length == 1:
        return aten.ssm2(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, segment_ids)
    step = time_step(dt, dt_bias, dt_softplus, dt_limit, torch.float32)
    number = None if segment_ids is None else documents.numbers(segment_ids).to(torch.int32)
    state = first_state(x, sizes, initial_state)
    outputs, last = call_jax_with_gradient(
        jax_chunks.ssm2, jax_chunks.ssm2_backward, x, step, A.float(), B, C, state, number, outputs=2,
        precision="highest" if x.dtype == torch.float32 else "high",
    )  # fmt: skip
    return finish(outputs, x, per_head(D), z), last
