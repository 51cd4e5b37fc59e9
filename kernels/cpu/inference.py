"""The calls that every C++ operator without a gradient refuses; ATen runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from easytorch.kernels.cpu import library
from easytorch.kernels.interop.torch_func import as_given, eager

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Passed for an absent tensor: the operators take tensors only.
ABSENT = {dtype: torch.empty(0, dtype=dtype) for dtype in DTYPES}
_FLOATS = frozenset(DTYPES)
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_NO_GRADIENT = "it has no gradient"


def refusal(
    given: Iterable[Any], gradients: bool = False, *, dtype: torch.dtype | None = None, elementwise: bool = False
) -> str | None:
    """None if such an operator may be called with these arguments, else the reason; only tensors are looked at.

    gradients: the operator has one. dtype, elementwise: as in `as_given`. It may build the library.
    """
    if not as_given(dtype, elementwise=elementwise):
        return _not_as_given()
    recorded, other = not gradients and torch.is_grad_enabled(), None
    for x in given:
        plain = type(x) in _PLAIN
        if not plain and not isinstance(x, Tensor):
            continue
        if recorded and x.requires_grad:
            return _NO_GRADIENT
        if not plain or x.layout is not _STRIDED:
            other = x
    if other is not None:
        return f"it takes plain dense tensors, got {type(other).__name__} ({other.layout})"
    return library.missing()


def _not_as_given() -> str:
    if not eager() or torch._C._get_tracing_state() is not None:
        return "it does not run in graphs or torch.func's transforms"
    return _NO_GRADIENT if forward_ad._current_level >= 0 else "autocast would change the dtype"


def other_dtype(dtype: torch.dtype) -> str:
    """The refusal of a dtype outside `DTYPES`."""
    return f"it computes in float32, bfloat16 and float16, got {dtype}"


def refusal_of_one_dtype(*tensors: Tensor, gradients: bool = False) -> str | None:
    """`refusal` of an elementwise operator whose tensors have one dtype."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return other_dtype(dtype)
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return f"it takes one dtype, got {dtype} and {tensor.dtype}"
    return refusal(tensors, gradients, elementwise=True)


def takes(*tensors: Tensor | None, gradients: bool = False) -> bool:
    """Whether `refusal_of_one_dtype` is None and all are on the CPU, without a reason: this is asked of each call."""
    first = tensors[0]
    assert first is not None
    dtype, recorded = first.dtype, not gradients and torch.is_grad_enabled()
    if dtype not in _FLOATS or not as_given(elementwise=True):
        return False
    for x in tensors:
        if x is not None and (
            x.dtype is not dtype
            or type(x) not in _PLAIN
            or not x.is_cpu
            or x.layout is not _STRIDED
            or (recorded and x.requires_grad)
        ):
            return False
    return library.missing() is None


def last_dim_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a contiguous copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # `contiguous()` returns empty tensors as they are
