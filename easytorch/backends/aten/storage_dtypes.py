"""The dtype in which a tensor stores an element type that ATen has few kernels for.

uint16, uint32 and uint64 are stored as the signed integers with the same bits, the float8 types as uint8 with the same
bits: operations that only move elements need no special kernels, addition and multiplication modulo 2**bits are the
same, and operations that depend on the value convert it first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from easytorch.backends.dtypes import DType

_WORDS = {DType.UINT16: torch.int16, DType.UINT32: torch.int32, DType.UINT64: torch.int64}
_FLOAT8 = tuple(dtype for dtype in DType if dtype.is_float and dtype.size == 1)
_FNUZ = (DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ)
# The dtypes that torch has tensors of: all but int4 and uint4.
HELD = tuple(dtype for dtype in DType if dtype.bits >= 8)
# Above this a float32 overflows float8_e4m3fn: NaN by IEEE's rule, where torch saturates some of these types.
_FN_LIMIT = 464.0


def held(dtype: DType) -> torch.dtype:
    """torch's own type of this name."""
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def storage_dtype(dtype: DType) -> torch.dtype:
    """The dtype of the tensors that hold `dtype` inside a computation."""
    return torch.uint8 if dtype in _FLOAT8 else _WORDS.get(dtype) or held(dtype)


def has_storage_dtype(dtype: DType) -> bool:
    """Whether a tensor of `dtype` is viewed as another type inside a computation."""
    return dtype in _FLOAT8 or dtype in _WORDS


def is_word(dtype: DType) -> bool:
    """Whether `dtype` is an unsigned integer that is stored as a signed one."""
    return dtype in _WORDS


def is_float8(dtype: DType) -> bool:
    """Whether `dtype` is a float of one byte."""
    return dtype in _FLOAT8


def is_narrow(dtype: DType) -> bool:
    """Whether `dtype` is a float narrower than float32."""
    return dtype.is_float and dtype.size < 4


def wide(x: Tensor, dtype: DType) -> Tensor:
    """Narrow floats as float32; anything else unchanged."""
    if dtype in _FLOAT8:
        found = x.view(held(dtype)).to(torch.float32)
        # The NaN of these two becomes a signaling one, of which the C library's pow(nan, 0) is NaN.
        return torch.where(found.isnan(), torch.nan, found) if dtype in _FNUZ else found
    return x.to(torch.float32) if is_narrow(dtype) else x


def narrow(x: Tensor, dtype: DType) -> Tensor:
    """The inverse of `wide`, rounding: x is float32 if `dtype` is a narrow float."""
    if dtype is DType.FLOAT8_E4M3FN:
        x = torch.where(x.abs() > _FN_LIMIT, torch.nan, x)
    return x.to(held(dtype)).view(torch.uint8) if dtype in _FLOAT8 else x.to(storage_dtype(dtype))


def swapped(dtype: DType) -> Callable[[Tensor], Tensor]:
    """Maps unsigned integers, stored as signed ones, to signed integers of the same order, and back; others stay."""
    if dtype not in _WORDS:
        return lambda x: x
    top = -(2 ** (dtype.bits - 1))
    return lambda x: x.bitwise_xor(top)


def integers(x: Tensor, dtype: DType) -> Tensor:
    """The values of integers as int64; of uint64 its bits."""
    wide = x.to(torch.int64)
    return wide.bitwise_and(2**dtype.bits - 1) if dtype in _WORDS and dtype.bits < 64 else wide


def indices(x: Tensor, dtype: DType) -> Tensor:
    """Integers as int64 indices in the order of their values: uint64 values of 2**63 or more become 2**63 - 1."""
    wide = integers(x, dtype)
    return torch.where(wide < 0, 2**63 - 1, wide) if dtype is DType.UINT64 else wide


def lowest(dtype: DType) -> int | float:
    """The least element of a real dtype in the order of `swapped` or `wide`: -inf where the dtype has one."""
    if dtype.is_float:
        return -highest(dtype)
    return 0 if dtype is DType.BOOL else torch.iinfo(storage_dtype(dtype)).min


def highest(dtype: DType) -> int | float:
    """The greatest element of a real dtype in the same order: inf where the dtype has one."""
    if dtype.is_float:
        finite = is_float8(dtype) and dtype is not DType.FLOAT8_E5M2
        return torch.finfo(held(dtype)).max if finite else torch.inf
    return 1 if dtype is DType.BOOL else torch.iinfo(storage_dtype(dtype)).max
