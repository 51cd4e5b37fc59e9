"""Type conversions, bitcasts and constants."""

from __future__ import annotations

import numpy as np

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value, tensor
from easytorch.backends.xla.narrow import low_nibble, widen
from easytorch.backends.xla.ops import Emit

_NIBBLES = (DType.INT4, DType.UINT4)


def convert(e: Emitter, x: Value, dtype: DType) -> Value:
    """x as `dtype`: `Builder.convert_dtype`."""
    if dtype is x.dtype:
        return x
    if x.dtype.is_complex and not dtype.is_complex:
        x = e.op("real", (x,), x.shape.with_dtype(x.dtype.real))
    if dtype is DType.BOOL:
        wide = widen(e, x)
        return e.compare("NE", wide, e.like(wide, 0))
    x = widen(e, x)
    if dtype in _NIBBLES:
        return _to_nibble(e, x, dtype)
    if dtype.is_float and dtype.size == 1 and not x.dtype.is_float:
        x = e.convert(x, DType.FLOAT32)
    return e.convert(x, dtype)


def _to_nibble(e: Emitter, x: Value, dtype: DType) -> Value:
    if not x.dtype.is_float:
        return e.convert(low_nibble(e, x, dtype), dtype)
    least, most = (-8, 7) if dtype is DType.INT4 else (0, 15)
    x = e.convert(x, DType.FLOAT32)
    number = e.select(e.compare("EQ", x, x), x, e.like(x, 0))
    inside = e.binary("maximum", e.binary("minimum", number, e.like(x, most)), e.like(x, least))
    return e.convert(e.convert(inside, DType.INT8), dtype)


def bitcast(e: Emitter, x: Value, target_dtype: DType) -> Value:
    """The bits of x read as another type: `Builder.bitcast`."""
    if target_dtype is x.dtype:
        return x
    if x.dtype is DType.BOOL:
        return _bits_together(e, x, target_dtype)
    if target_dtype is DType.BOOL:
        return _bits_apart(e, x)
    if x.dtype.is_complex:
        return _from_parts(e, x, target_dtype)
    if target_dtype.is_complex:
        return _to_complex(e, x, target_dtype)
    if x.dtype.bits == target_dtype.bits == 4:
        return e.convert(low_nibble(e, widen(e, x), target_dtype), target_dtype)
    if x.dtype in _NIBBLES:
        return bitcast(e, _joined(e, x), target_dtype) if target_dtype.bits > 8 else _to_byte(e, x, target_dtype)
    if target_dtype in _NIBBLES:
        return _split(e, x, target_dtype)
    return e.bits(x, _cast_shape(x.shape, target_dtype))


def _bits_together(e: Emitter, x: Value, target: DType) -> Value:
    """Packs bools eight (or four) to a byte, lowest bit first, and reads the bytes as `target`."""
    count = min(target.bits, 8)
    lead = x.dimensions[:-1]
    groups = e.reshape(e.convert(x, DType.UINT8), *lead, max(target.bits // 8, 1), count)
    shifted = e.binary("shift_left", groups, e.iota(groups.shape, len(groups.dimensions) - 1))
    data = e.reduce("or", shifted, 0, (len(lead) + 1,))
    if target.bits > 8:
        return bitcast(e, data, target)
    byte = e.reshape(data, *lead)
    return e.convert(low_nibble(e, byte, target), target) if target in _NIBBLES else bitcast(e, byte, target)


def _bits_apart(e: Emitter, x: Value) -> Value:
    count = min(x.dtype.bits, 8)
    data = low_nibble(e, widen(e, x), DType.UINT4) if x.dtype in _NIBBLES else bitcast(e, x, DType.UINT8)
    data = e.reshape(data, *x.dimensions, max(x.dtype.bits // 8, 1))
    each = e.broadcast(data, (*data.dimensions, count), range(len(data.dimensions)))
    shifted = e.binary("shift_right_logical", each, e.iota(each.shape, len(data.dimensions)))
    one = e.binary("and", shifted, e.like(shifted, 1))
    return e.reshape(e.compare("NE", one, e.like(one, 0)), *x.dimensions, x.dtype.bits)


def _cast_shape(shape: Shape, target: DType) -> Shape:
    here, there = shape.dtype.bits, target.bits
    if here == there:
        return shape.with_dtype(target)
    if here > there:
        return Shape(target, (*shape.dimensions, here // there))
    return Shape(target, shape.dimensions[:-1])


def _from_parts(e: Emitter, x: Value, target: DType) -> Value:
    """The bitcast of complex numbers, which XLA's own does not take: real and imaginary parts along the last axis."""
    part = x.dtype.real
    parts = [e.reshape(e.op(name, (x,), x.shape.with_dtype(part)), *x.dimensions, 1) for name in ("real", "imag")]
    joined = e.op("concatenate", parts, Shape(part, (*x.dimensions, 2)), f"dimension = {x.rank} : i64")
    if target.is_complex:
        if target.bits > x.dtype.bits:
            joined = e.reshape(joined, *x.dimensions[:-1], 2 * x.dimensions[-1])
        return _to_complex(e, bitcast(e, joined, DType.FLOAT32), target)
    if target.bits >= part.bits:
        return bitcast(e, joined, target)
    narrow = bitcast(e, joined, target)
    return e.reshape(narrow, *x.dimensions, x.dtype.bits // target.bits)


def _to_complex(e: Emitter, x: Value, target: DType) -> Value:
    """The bits of x read as complex numbers: pairs of floats along the last axis."""
    part = target.real
    count = x.dtype.bits * (x.dimensions[-1] if x.dtype.bits < target.bits else 1) // part.bits
    lead = x.dimensions[:-1] if x.dtype.bits < target.bits else x.dimensions
    if x.dtype.bits < part.bits:
        x = e.reshape(x, *lead, count, part.bits // x.dtype.bits)
    parts = e.reshape(bitcast(e, x, part), *lead, count // 2, 2)
    shape = Shape(part, (*lead, count // 2))
    halves = []
    for number in range(2):
        starts, limits = (0,) * (len(lead) + 1) + (number,), (*lead, count // 2, number + 1)
        halves.append(e.reshape(e.slice(parts, starts, limits), *shape.dimensions))
    numbers = e.op("complex", halves, shape.with_dtype(target))
    return e.reshape(numbers, *lead) if count == 2 else numbers


def _joined(e: Emitter, x: Value) -> Value:
    """Packs pairs of 4-bit integers along the last axis into bytes, the low half first."""
    count = x.dimensions[-1] // 2
    twos = e.reshape(low_nibble(e, widen(e, x), DType.UINT4), *x.dimensions[:-1], count, 2)
    shape = (*x.dimensions[:-1], count)
    low, high = (e.reshape(e.slice(twos, (0,) * x.rank + (n,), (*shape, n + 1)), *shape) for n in range(2))
    return e.binary("or", low, e.binary("shift_left", high, e.like(high, 4)))


def _to_byte(e: Emitter, x: Value, target: DType) -> Value:
    byte = _joined(e, x)
    return e.bits(e.reshape(byte, *x.dimensions[:-1]), Shape(target, x.dimensions[:-1]))


def _split(e: Emitter, x: Value, target: DType) -> Value:
    """Splits each element into its 4-bit pieces, lowest first, along a new axis."""
    flat = e.bits(x, _cast_shape(x.shape, DType.UINT8))
    data = e.reshape(flat, *flat.dimensions, 1)
    high = e.binary("shift_right_logical", data, e.like(data, 4))
    both = e.op(
        "concatenate", (data, high), Shape(DType.UINT8, (*flat.dimensions, 2)), f"dimension = {flat.rank} : i64"
    )
    pieces = e.convert(low_nibble(e, both, target), target)
    return e.reshape(pieces, *x.dimensions, x.dtype.bits // 4)


def constant(e: Emitter, value: np.ndarray, shape: Shape) -> Value:
    """A literal: one element if all are equal, else the bytes."""
    array = np.ascontiguousarray(value).reshape(shape.dimensions)
    if shape.size > 1 and _is_uniform(array):
        return e.broadcast(constant(e, array.reshape(-1)[:1].reshape(()), Shape(shape.dtype)), shape.dimensions, ())
    if shape.dtype in _NIBBLES:
        wide = DType.INT8 if shape.dtype is DType.INT4 else DType.UINT8
        return e.convert(_raw(e, array.astype(wide.numpy), shape.with_dtype(wide)), shape.dtype)
    if shape.dtype is DType.BOOL:
        byte = _raw(e, array.view(np.uint8), shape.with_dtype(DType.UINT8))
        return e.compare("NE", byte, e.like(byte, 0))
    if shape.dtype.is_float and shape.dtype.size == 1:
        # Some versions of jaxlib abort on the text of such a constant: its bits are written and bitcast.
        byte = _raw(e, array.view(np.uint8), shape.with_dtype(DType.UINT8))
        return e.bits(byte, shape)
    return _raw(e, array, shape)


def _is_uniform(array: np.ndarray) -> bool:
    bits = array.reshape(-1, 1).view(np.uint8)
    return bool((bits == bits[0]).all())


def _raw(e: Emitter, array: np.ndarray, shape: Shape) -> Value:
    data = f'"0x{array.tobytes().hex().upper()}"' if shape.size else ""
    return e.op("constant", (), shape, f"value = dense<{data}> : {tensor(shape)}")


EMITTERS: dict[OpType, Emit] = {
    OpType.CONVERT_DTYPE: convert,
    OpType.BITCAST: bitcast,
}
