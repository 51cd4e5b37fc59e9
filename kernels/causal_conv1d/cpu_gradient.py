"""Causal convolution in C++ under autograd: the operators `causal_conv1d` and `causal_conv1d_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.causal_conv1d import native
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import contiguous_or_empty, gradients, segments_or_empty, state_or_empty


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str | None,
    segment_ids: Tensor | None, level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`native.causal_conv1d` of checked arguments, with gradients of every order."""
    results: tuple[Tensor, Tensor] = _Convolution.apply(x, weight, bias, initial_state, segment_ids, activation, level)
    return results


class _Convolution(torch.autograd.Function):
    """Gradients of every order, after the first the definition's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
        segment_ids: Tensor | None, activation: str | None, level: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, initial_state, segment_ids)
        ctx.activation, ctx.level = activation, level
        ctx.set_materialize_grads(False)
        results: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.causal_conv1d.default(
            last_dim_contiguous(x), weight, contiguous_or_empty(bias), state_or_empty(initial_state),
            segments_or_empty(segment_ids), activation is not None, level,
        )  # fmt: skip
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, final_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, segment_ids = ctx.saved_tensors
        activation, level = ctx.activation, ctx.level

        def definition(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return native.causal_conv1d(x, weight, bias, state, activation, segment_ids)

        def by_cpp(
            grad: Tensor, final_grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = torch.ops.easytorch_cpu.causal_conv1d_backward.default(
                grad, final_grad, last_dim_contiguous(x), weight, contiguous_or_empty(bias), state_or_empty(state),
                segments_or_empty(segment_ids), activation is not None, level,
            )  # fmt: skip
            return found

        return gradients(ctx.needs_input_grad, inputs, grad, final_grad, inputs[0], definition, by_cpp)
