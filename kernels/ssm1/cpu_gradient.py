"""The selective scan in C++ under autograd: the operators `ssm1` and `ssm1_backward` run the recurrence; the time step
before it, and D and z after it, are ATen's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import ABSENT, last_dim_contiguous
from easytorch.kernels.cpu.recurrences import segments_or_empty, state_or_empty, state_space_tensors
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import transforming
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
        needed = ctx.needs_input_grad[:6]
        if grad is None and final_grad is None:
            return (None,) * 8
        if torch.is_grad_enabled() or transforming():

            def definition(
                x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
            ) -> tuple[Tensor, Tensor]:
                return native.ssm1(x, step, A, B, C, initial_state=state, segment_ids=segment_ids)

            return *by_definition(definition, inputs, needed, (grad, final_grad)), None, None
        x, step, A, B, C, initial_state = inputs
        if grad is None:
            grad = x.new_zeros(()).expand(x.shape)
        found = torch.ops.easytorch_cpu.ssm1_backward.default(
            last_dim_contiguous(grad), ABSENT[torch.float32] if final_grad is None else state_or_empty(final_grad),
            last_dim_contiguous(x), last_dim_contiguous(step), A.to(torch.float32).contiguous(),
            last_dim_contiguous(B), last_dim_contiguous(C), state_or_empty(initial_state),
            segments_or_empty(segment_ids), ctx.level,
        )  # fmt: skip
        wanted = zip(found, inputs, needed, strict=True)
        return *(one.to(given.dtype) if need else None for one, given, need in wanted), None, None
