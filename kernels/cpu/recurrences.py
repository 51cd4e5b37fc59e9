"""Shared by the C++ operators of recurrences: refused calls, placeholders for absent tensors, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.cpu.inference import ABSENT, DTYPES, last_dim_contiguous, refusal
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import transforming

_EMPTY = ABSENT[torch.float32]
_NO_SEGMENTS = torch.empty(0, dtype=torch.int64)


def refusal_of_sequences(
    floating: Sequence[Tensor | None], segment_ids: Tensor | None, not_empty: Iterable[Tensor], gradients: bool = False
) -> str | None:
    """None if the operator supports these tensors (None for absent ones), else the reason.

    gradients: the operator has one.
    """
    for tensor in floating:
        if tensor is not None and tensor.dtype not in DTYPES and tensor.is_floating_point():  # others are errors
            return f"it takes float32, bfloat16 and float16, got {tensor.dtype}"
    for tensor in not_empty:
        tokens = tensor.shape[1] if tensor.dim() > 2 else 1  # without tokens it is an error of `check_arguments`
        if tensor.numel() == 0 and tokens > 0:
            return "it does not take empty tensors"
    # autocast would cast only the products inside, which the other paths keep out of it too
    return refusal((*floating, segment_ids), gradients, elementwise=True)


def prefers(tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors are on a CPU of the kind on which the operators were measured."""
    return processor.AVX2 and all(tensor.is_cpu for tensor in tensors)


def sequence_or_empty(tensor: Tensor | None) -> Tensor:
    return _EMPTY if tensor is None else last_dim_contiguous(tensor)


def contiguous_or_empty(tensor: Tensor | None) -> Tensor:
    return _EMPTY if tensor is None else tensor.contiguous()


def state_or_empty(tensor: Tensor | None) -> Tensor:
    return _EMPTY if tensor is None else tensor.to(torch.float32).contiguous()


def segments_or_empty(segment_ids: Tensor | None) -> Tensor:
    return _NO_SEGMENTS if segment_ids is None else segment_ids.to(torch.int64)


def state_space_tensors(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, segment_ids: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The tensors of `ssm1` and `ssm2` as their operators take them, in order."""
    return (
        last_dim_contiguous(x),
        last_dim_contiguous(dt),
        A.to(torch.float32).contiguous(),
        last_dim_contiguous(B),
        last_dim_contiguous(C),
        contiguous_or_empty(D),
        sequence_or_empty(z),
        contiguous_or_empty(dt_bias),
        state_or_empty(initial_state),
        segments_or_empty(segment_ids),
    )


def gradients(
    needs_input_grad: Sequence[bool], inputs: Sequence[Tensor | None], grad: Tensor | None, final_grad: Tensor | None,
    outputs: Tensor, definition: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Sequence[Tensor]],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What the `backward` of a recurrence returns.

    needs_input_grad: of its forward, whose first arguments are inputs; the others have no gradient.
    outputs: a tensor of the outputs' shape and dtype. definition(*inputs): for gradients that are differentiated again.
    backward(grad, final_grad, *inputs): the operator, -> a gradient of each input, of any dtype.
    """
    needed, others = needs_input_grad[: len(inputs)], (None,) * (len(needs_input_grad) - len(inputs))
    if grad is None and final_grad is None:
        return (None,) * len(needed) + others
    if torch.is_grad_enabled() or transforming():
        return *by_definition(definition, inputs, needed, (grad, final_grad)), *others
    if grad is None:
        grad = outputs.new_zeros(()).expand(outputs.shape)
    found = backward(last_dim_contiguous(grad), state_or_empty(final_grad), *inputs)
    wanted = zip(found, inputs, needed, strict=True)
    return *(one.to(given.dtype) if need and given is not None else None for one, given, need in wanted), *others
