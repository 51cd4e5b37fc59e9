"""Conversions between element types, and their bits read as other types."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.storage_dtypes import held, integers, is_float8, is_narrow, narrow, storage_dtype, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType

_TOP = -(2**63)


def bind_convert(context: NodeContext) -> Kernel:
    """Floats to integers towards zero and clamped, NaN to 0; anything but zero is true."""
    return converter(context.dtype, context.attributes["dtype"])


def converter(source: DType, target: DType) -> Callable[[Tensor], Tensor]:
    """The function from the storage dtype of one type to that of another."""
    if source is target:
        return lambda x: x
    if source.is_complex and not target.is_complex:
        rest = converter(source.real, target)
        return lambda x: rest(torch.real(x))
    if target is DType.BOOL:
        return lambda x: wide(x, source) != 0
    if target.is_complex:
        if source.is_complex:
            return lambda x: x.to(held(target))
        part = converter(source, target.real)
        return lambda x: part(x).to(held(target))
    if target.is_integer:
        if source.is_float:
            return lambda x: _truncated(wide(x, source), target)
        return lambda x: integers(x, source).to(storage_dtype(target))
    if source is DType.UINT64:
        return lambda x: _rounded(_unsigned_to_float(x, target), target)
    if source is DType.FLOAT64:
        return lambda x: _rounded(x, target)
    if source.is_float:
        return lambda x: narrow(wide(x, source), target)
    if is_float8(target):
        return lambda x: narrow(integers(x, source).to(torch.float32), target)
    return lambda x: integers(x, source).to(held(target))


def _truncated(x: Tensor, target: DType) -> Tensor:
    signed = target.value.startswith("int")
    low, high = (-(2 ** (target.bits - 1)), 2 ** (target.bits - 1)) if signed else (0, 2**target.bits)
    truncated = x.trunc()
    inside = torch.where((truncated >= low) & (truncated < float(high)), truncated, 0)
    if target is DType.UINT64:
        upper = inside >= 2.0**63
        words = torch.where(upper, inside - 2.0**63, inside).to(torch.int64)
        result = torch.where(upper, words.bitwise_xor(_TOP), words)
        return torch.where(truncated >= float(high), -1, result)
    result = torch.where(truncated < low, low, inside.to(torch.int64))
    return torch.where(truncated >= float(high), high - 1, result).to(storage_dtype(target))


def _unsigned_to_float(x: Tensor, target: DType) -> Tensor:
    """uint64 stored as int64 to float, rounded once: half of it, its last bit kept, is in int64's range."""
    float_type = torch.float64 if target is DType.FLOAT64 else torch.float32
    half = ((x >> 1) & (2**63 - 1)) | (x & 1)
    return torch.where(x < 0, half.to(float_type) * 2, x.to(float_type))


def _rounded(x: Tensor, target: DType) -> Tensor:
    """float64 or float32 to any real float with one rounding, where torch goes through float32 and rounds twice."""
    if not is_narrow(target):
        return x.to(held(target))
    return narrow(_to_odd(x) if x.dtype == torch.float64 else x, target)


def _to_odd(x: Tensor) -> Tensor:
    """float64 to float32, inexact values to the neighbour with an odd last bit: a second rounding then is the only one.

    Boldo and Melquiond, Emulation of FMA and correctly rounded sums (2008), section 3.
    """
    near = x.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    step = torch.where(back.abs() > x.abs(), -1, 1).to(torch.int32)
    inexact = (back != x) & ~x.isnan() & (bits & 1 == 0)
    return torch.where(inexact, bits + step, bits).view(torch.float32)


def bind_bitcast(context: NodeContext) -> Kernel:
    """The lowest bits first: a wider type takes up the last axis, a narrower adds one."""
    wanted = context.attributes["target_dtype"]
    if context.dtype is wanted:
        return lambda x: x
    if DType.BOOL in (context.dtype, wanted):
        return _bits_together(wanted) if context.dtype is DType.BOOL else _bits_apart(context.dtype)
    source, target = context.dtype, storage_dtype(wanted)
    bits = context.attributes["target_dtype"].bits
    if source.bits == bits:
        return lambda x: x.view(target)
    if source.bits > bits:
        return lambda x: x.contiguous().unsqueeze(-1).view(target)
    # Copied: a view as a wider type needs an aligned start.
    return lambda x: x.clone(memory_format=torch.contiguous_format).view(target).squeeze(-1)


def _bits_together(target: DType) -> Kernel:
    """Every eight bools a byte, the first the lowest bit, and the bytes read as `target`."""

    def join(x: Tensor) -> Tensor:
        eights = x.reshape(*x.shape[:-1], target.size, 8).to(torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        data = torch.bitwise_left_shift(eights, places).sum(-1, dtype=torch.uint8)
        return data.view(storage_dtype(target)).squeeze(-1)

    return join


def _bits_apart(source: DType) -> Kernel:
    def split(x: Tensor) -> Tensor:
        data = x.contiguous().unsqueeze(-1).view(torch.uint8).unsqueeze(-1)
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        bits = torch.bitwise_right_shift(data, places) & 1
        return bits.to(torch.bool).reshape(*x.shape, source.bits)

    return split


CONVERSION: dict[OpType, Binder] = {
    OpType.CONVERT_DTYPE: bind_convert,
    OpType.BITCAST: bind_bitcast,
}
