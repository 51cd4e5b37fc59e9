"""Shared by the C++ operators of recurrences: the calls that they refuse, and placeholders for absent tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.cpu.inference import ABSENT, DTYPES, last_dim_contiguous, refusal

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
