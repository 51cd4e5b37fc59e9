"""Conversions to another element type, by value and by bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.reference.narrow import wide, wrapped
from easytorch.backends.types import OpType


def _convert(x: np.ndarray, dtype: DType) -> np.ndarray:
    source = dtype_of(x.dtype)
    if source.is_complex and not dtype.is_complex:
        x, source = x.real, source.real
    if dtype is DType.BOOL:
        return np.asarray(wide(x) != 0)
    if source.is_float and dtype.is_integer:
        return _truncated(x, dtype)
    with np.errstate(all="ignore"):
        return wrapped(wide(x), dtype) if dtype.is_integer else wide(x).astype(dtype.numpy)


def _truncated(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Floats to integers: towards zero, clamped, NaN to 0."""
    truncated = np.trunc(x.astype(np.float64))
    signed = dtype.value.startswith("int")
    least = -(2 ** (dtype.bits - 1)) if signed else 0
    most = 2 ** (dtype.bits - (1 if signed else 0)) - 1
    inside = np.where(np.isnan(truncated) | (truncated < least) | (truncated >= float(most)), 0, truncated)
    integers = inside.astype(np.int64 if signed else np.uint64)
    integers = np.where(truncated < least, np.array(least, integers.dtype), integers)
    return np.where(truncated >= float(most), np.array(most, integers.dtype), integers).astype(dtype.numpy)


def _bitcast(x: np.ndarray, target_dtype: DType) -> np.ndarray:
    source = dtype_of(x.dtype)
    if source is target_dtype:
        return x
    if source is DType.BOOL:
        joined = np.packbits(x, axis=-1, bitorder="little")
        if target_dtype.bits == 4:
            return wrapped(joined, target_dtype).reshape(x.shape[:-1])
        return _bitcast(joined if target_dtype.bits > 8 else joined.reshape(x.shape[:-1]), target_dtype)
    if target_dtype is DType.BOOL:
        data = wide(x).view(np.uint8) if source.bits == 4 else np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        each = data.reshape(*x.shape, max(source.bits // 8, 1), 1)
        return (
            np.unpackbits(each, axis=-1, count=min(source.bits, 8), bitorder="little")
            .astype(bool)
            .reshape(*x.shape, source.bits)
        )
    if source.bits == target_dtype.bits:
        if source.bits == 4:
            return wrapped(x, target_dtype)
        return np.ascontiguousarray(x).reshape(-1).view(target_dtype.numpy).reshape(x.shape)
    if 4 in (source.bits, target_dtype.bits):
        return _bitcast_nibbles(x, source, target_dtype)
    flat = np.ascontiguousarray(x).reshape(-1).view(target_dtype.numpy)
    wider = source.bits > target_dtype.bits
    return flat.reshape((*x.shape, source.bits // target_dtype.bits) if wider else x.shape[:-1])


def _bitcast_nibbles(x: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """A 4-bit element takes a byte here: packs two to a byte, the low half first, or unpacks them."""
    if source.bits == 4:
        pairs = (wide(x).astype(np.int64) & 15).astype(np.uint8).reshape(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).view(target.numpy).reshape(x.shape[:-1])
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return wrapped(np.stack([data & 15, data >> 4], -1), target).reshape(*x.shape, source.bits // 4)


CONVERSION: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.CONVERT_DTYPE: _convert,
    OpType.BITCAST: _bitcast,
}
