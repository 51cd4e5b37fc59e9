"""The scan of Mamba-2 in C++ under autograd: the operators `ssm2_training` and `ssm2_backward` run the recurrence, D
and z; the time step before them is ATen's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import (
    contiguous_or_empty,
    gradients,
    segments_or_empty,
    sequence_or_empty,
    state_or_empty,
    state_space_tensors,
)
from easytorch.kernels.ssm2 import aten
from easytorch.kernels.ssm2.native import time_step

INFINITY = float("inf")


def ssm2(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], initial_state: Tensor | None, segment_ids: Tensor | None,
    level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`native.ssm2` of checked arguments, with gradients of every order."""
    step = time_step(dt, dt_bias, dt_softplus, dt_limit, torch.float32)
    results: tuple[Tensor, Tensor] = _Scan.apply(x, step, A, B, C, D, z, initial_state, segment_ids, level)
    return results


class _Scan(torch.autograd.Function):
    """The scan from the time step on; gradients of every order, after the first those of the products of chunks by
    ATen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        initial_state: Tensor | None, segment_ids: Tensor | None, level: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outputs, state, plain = torch.ops.easytorch_cpu.ssm2_training.default(
            *state_space_tensors(x, step, A, B, C, D, z, None, initial_state, segment_ids),
            False, -INFINITY, INFINITY, level,
        )  # fmt: skip
        ctx.save_for_backward(x, step, A, B, C, D, z, initial_state, segment_ids, plain)
        ctx.level = level
        ctx.set_materialize_grads(False)
        return outputs, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, final_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, segment_ids, plain = ctx.saved_tensors
        level = ctx.level

        def definition(
            x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
            state: Tensor | None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            return aten.ssm2(
                x, step, A, B, C, D, z, dt_limit=(-INFINITY, INFINITY), initial_state=state, segment_ids=segment_ids
            )

        def by_cpp(
            grad: Tensor, final_grad: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor,
            D: Tensor | None, z: Tensor | None, state: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            found: tuple[Tensor, ...] = torch.ops.easytorch_cpu.ssm2_backward.default(
                grad, final_grad, last_dim_contiguous(x), last_dim_contiguous(step), A.to(torch.float32).contiguous(),
                last_dim_contiguous(B), last_dim_contiguous(C), contiguous_or_empty(D), sequence_or_empty(z), plain,
                state_or_empty(state), segments_or_empty(segment_ids), level,
            )  # fmt: skip
            return found

        return gradients(ctx.needs_input_grad, inputs, grad, final_grad, inputs[0], definition, by_cpp)
