"""What the operators in C++ of recurrences share: which calls they leave to ATen, and how they take absent tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.cpu.inference import ABSENT, DTYPES, refusal, side_by_side

_NO_NUMBERS = ABSENT[torch.float32]
_NO_DOCUMENTS = torch.empty(0, dtype=torch.int64)


def refusal_of_sequences(
    floating: Sequence[Tensor | None], segment_ids: Tensor | None, not_empty: Iterable[Tensor]
) -> str | None:
    """None when the operator takes a call of these tensors, absent ones None, else the reason."""
    for tensor in floating:
        if tensor is not None and tensor.dtype not in DTYPES and tensor.is_floating_point():  # others are errors
            return f"it computes in float32, of float32, bfloat16 and float16, got {tensor.dtype}"
    for tensor in not_empty:
        tokens = tensor.shape[1] if tensor.dim() > 2 else 1  # no token at all is an error elsewhere
        if tensor.numel() == 0 and tokens > 0:
            return "tensors without numbers are ATen's"
    return refusal((*floating, segment_ids))


def prefers(tensors: Iterable[Tensor]) -> bool:
    """Whether these are on the CPU, and that one on which the operators were measured."""
    return processor.BFLOAT16_DOT_PRODUCTS and all(tensor.is_cpu for tensor in tensors)


def numbers_of(tensor: Tensor | None) -> Tensor:
    return _NO_NUMBERS if tensor is None else side_by_side(tensor)


def vector_of(tensor: Tensor | None) -> Tensor:
    return _NO_NUMBERS if tensor is None else tensor.contiguous()


def state_of(tensor: Tensor | None) -> Tensor:
    return _NO_NUMBERS if tensor is None else tensor.to(torch.float32).contiguous()


def document_ids(segment_ids: Tensor | None) -> Tensor:
    return _NO_DOCUMENTS if segment_ids is None else segment_ids.to(torch.int64)
