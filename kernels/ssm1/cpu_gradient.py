"""The selective scan in C++ under autograd: the operators `ssm1` and `ssm1_backward` run the recurrence; the time step
before it, and D and z after it, are ATen's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import gradients, segments_or_empty, state_or_empty, state_space_tensors
from easytorch.kernels.ssm1 import native


def ssm1(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, initial_state: Tensor | None, segment_ids: Tensor | None, level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`native.ssm1` of checked arguments, with gradients of every order."""
    step = native.time_step(dt, dt_bias, dt_softplus, torch.float32)
    scanned, state = _Scan.apply(x.float(), step, A, B, C, initial_state, segment_ids, level)
    return native.finish(scanned, x, D, z), state


class _Scan(torch.autograd.Function):
    """The recurrence, x and step float32; gradients of every order, after the first the definition's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None,
        segment_ids: Tensor | None, level: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, step, A, B, C, initial_state, segment_ids)
        ctx.level = level
        ctx.set_materialize_grads(False)
        results: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.ssm1.default(
            *state_space_tensors(x, step, A, B, C, None, None, None, initial_state, segment_ids), False, level
        )
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, final_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, segment_ids = ctx.saved_tensors
        level = ctx.level

        def definition(
            x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
        ) -> tuple[Tensor, Tensor]:
            return native.ssm1(x, step, A, B, C, initial_state=state, segment_ids=segment_ids)

        def by_cpp(
            grad: Tensor, final_grad: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor,
            state: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            found: tuple[Tensor, ...] = torch.ops.easytorch_cpu.ssm1_backward.default(
                grad, final_grad, last_dim_contiguous(x), last_dim_contiguous(step), A.to(torch.float32).contiguous(),
                last_dim_contiguous(B), last_dim_contiguous(C), state_or_empty(state), segments_or_empty(segment_ids),
                level,
            )  # fmt: skip
            return found

        return gradients(ctx.needs_input_grad, inputs, grad, final_grad, inputs[0], definition, by_cpp)
