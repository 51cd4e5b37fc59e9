"""The gated delta rule in C++ under autograd: the operators `gated_delta_rule` and `gated_delta_rule_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import ABSENT, last_dim_contiguous
from easytorch.kernels.cpu.recurrences import segments_or_empty, state_or_empty
from easytorch.kernels.gated_delta_rule import aten, native
from easytorch.kernels.gated_delta_rule.native import EPSILON
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import transforming


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
        needed = ctx.needs_input_grad[:6]
        if grad is None and final_grad is None:
            return (None,) * 9
        if torch.is_grad_enabled() or transforming():
            scale = ctx.scale

            def definition(
                query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
            ) -> tuple[Tensor, Tensor]:
                return aten.gated_delta_rule(query, key, value, g, beta, scale, state, False, segment_ids)

            return *by_definition(definition, inputs, needed, (grad, final_grad)), None, None, None
        query, key, value, g, beta, initial_state = inputs
        if grad is None:
            grad = value.new_zeros(()).expand(value.shape)
        found = torch.ops.easytorch_cpu.gated_delta_rule_backward.default(
            last_dim_contiguous(grad), ABSENT[torch.float32] if final_grad is None else state_or_empty(final_grad),
            *(last_dim_contiguous(x) for x in (query, key, value, g, beta)), state_or_empty(initial_state),
            segments_or_empty(segment_ids), ctx.scale, ctx.level,
        )  # fmt: skip
        wanted = zip(found, inputs, needed, strict=True)
        return *(one.to(x.dtype) if need else None for one, x, need in wanted), None, None, None
