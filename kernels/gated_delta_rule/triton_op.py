"""The gated delta rule in Triton, for CUDA and ROCm; native.py defines it.

The gradient runs the chunks of aten.py again, on the same device. Nothing here imports Triton until a kernel is
launched; with TRITON_INTERPRET=1 set before that it runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.gated_delta_rule import aten
from easytorch.kernels.gated_delta_rule.native import DeltaRuleDims, check_arguments, first_state, prepare
from easytorch.kernels.interop.triton_devices import refusal
from easytorch.kernels.recurrence import documents, recompute

WIDEST = 256


def supports(key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when the kernel carries keys and values, taken as `dtype` (None: their own), else the reason why not."""
    if key.shape[-1] > WIDEST:
        return f"a state must fit the registers, keys at most {WIDEST} wide, got {key.shape[-1]}"
    return refusal(value.device, dtype or value.dtype)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    softmax_scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.gated_delta_rule` in Triton: the same shapes and dtypes.

    `ValueError` also for what `supports` refuses.
    """
    sizes = check_arguments(query, key, value, g, beta, initial_state, segment_ids)
    reason = supports(key, value)
    if reason is not None:
        raise ValueError(f"triton gated_delta_rule: {reason}")
    if sizes.length == 1:
        return aten.gated_delta_rule(
            query, key, value, g, beta, softmax_scale, initial_state, use_qk_l2norm, segment_ids
        )
    query, key = prepare(query, key, sizes, softmax_scale, use_qk_l2norm, torch.float32)
    number = None if segment_ids is None else documents.numbers(segment_ids).to(torch.int32)
    state = first_state(value, sizes, initial_state)
    return _forward(query, key, value, g.float(), beta.float(), state, number)


@torch.library.custom_op("easytorch::triton_gated_delta_rule", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The outputs in value's dtype, and the last state."""
    from easytorch.kernels.gated_delta_rule.triton_calls import forward_call

    output, last = _forward_fake(query, key, value, g, beta, state, number)
    g, beta, state = g.contiguous(), beta.contiguous(), state.contiguous()
    number = None if number is None else number.contiguous()
    forward_call(query, key, value, g, beta, state, number, output, last).launch()
    return output, last


@_forward.register_fake
def _forward_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return output, torch.empty(state.shape, dtype=torch.float32, device=value.device)


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    sizes = DeltaRuleDims(*query.shape, *value.shape[2:])
    return aten.chunks(query, key, value.float(), g, beta, state, number, sizes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return tuple(recompute.gradients(_plain, ctx.saved_tensors, grads, ctx.needs_input_grad))


_forward.register_autograd(_autograd, setup_context=_setup_context)
