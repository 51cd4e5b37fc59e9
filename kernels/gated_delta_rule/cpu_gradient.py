"""The gated delta rule in C++ under autograd: the operators `gated_delta_rule` and `gated_delta_rule_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import gradients, segments_or_empty, state_or_empty
from easytorch.kernels.gated_delta_rule import aten, native
from easytorch.kernels.gated_delta_rule.native import EPSILON


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, softmax_scale: float | None,
    initial_state: Tensor | None, use_qk_l2norm: bool, segment_ids: Tensor | None, level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`native.gated_delta_rule` of checked arguments, with gradients of every order."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if use_qk_l2norm:
        query, key = native.normalized(query.float(), key.float())
    results: tuple[Tensor, Tensor] = _DeltaRule.apply(
        query, key, value, g, beta, initial_state, segment_ids, scale, level
    )
    return results


class _DeltaRule(torch.autograd.Function):
    """Gradients of every order, after the first those of the products of chunks by ATen."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
        segment_ids: Tensor | None, scale: float, level: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(query, key, value, g, beta, initial_state, segment_ids)
        ctx.scale, ctx.level = scale, level
        ctx.set_materialize_grads(False)
        results: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.gated_delta_rule.default(
            *(last_dim_contiguous(x) for x in (query, key, value, g, beta)), state_or_empty(initial_state),
            segments_or_empty(segment_ids), scale, False, EPSILON, level,
        )  # fmt: skip
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, final_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, segment_ids = ctx.saved_tensors
        scale, level = ctx.scale, ctx.level

        def definition(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
        ) -> tuple[Tensor, Tensor]:
            return aten.gated_delta_rule(query, key, value, g, beta, scale, state, False, segment_ids)

        def by_cpp(
            grad: Tensor, final_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
            state: Tensor | None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            found: tuple[Tensor, ...] = torch.ops.easytorch_cpu.gated_delta_rule_backward.default(
                grad, final_grad, *(last_dim_contiguous(x) for x in (query, key, value, g, beta)),
                state_or_empty(state), segments_or_empty(segment_ids), scale, level,
            )  # fmt: skip
            return found

        return gradients(ctx.needs_input_grad, inputs, grad, final_grad, inputs[2], definition, by_cpp)
