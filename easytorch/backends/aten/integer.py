"""Operations on integers. Unsigned types of more than 8 bits are signed tensors here (see storage_dtypes.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Kernel, NodeContext
from easytorch.backends.aten.storage_dtypes import integers, storage_dtype
from easytorch.backends.dtypes import DType

_TOP = -(2**63)


def _is_signed(dtype: DType) -> bool:
    return dtype.value.startswith("int")


def bind_divide(context: NodeContext) -> Kernel:
    """Towards zero; by zero -1, or all bits if unsigned; the least integer by -1 is itself."""
    dtype = context.dtype
    if dtype is DType.UINT64:
        return lambda x0, x1: _divide_words(x0, x1)[0]
    to = storage_dtype(dtype)

    def divide(x0: Tensor, x1: Tensor) -> Tensor:
        if not _is_signed(dtype):
            x0, x1 = integers(x0, dtype), integers(x1, dtype)
        quotient = torch.div(x0, _safe(x1), rounding_mode="trunc")
        if _is_signed(dtype):
            quotient = torch.where(x1 == -1, -x0, quotient)
        return torch.where(x1 == 0, -1, quotient).to(to)

    return divide


def bind_remainder(context: NodeContext) -> Kernel:
    """The remainder has the sign of x0; of a division by zero it is x0."""
    dtype = context.dtype
    if dtype is DType.UINT64:
        return lambda x0, x1: _divide_words(x0, x1)[1]
    to = storage_dtype(dtype)

    def remainder(x0: Tensor, x1: Tensor) -> Tensor:
        if not _is_signed(dtype):
            x0, x1 = integers(x0, dtype), integers(x1, dtype)
        rest = torch.fmod(x0, _safe(x1))
        return torch.where(x1 == 0, x0, rest).to(to)

    return remainder


def _safe(x: Tensor) -> Tensor:
    """Divisors, but 1 for 0 and -1: dividing by those kills the process, or raises, on a CPU."""
    unsafe = (x == 0) | (x == -1) if x.dtype.is_signed else x == 0
    return torch.where(unsafe, 1, x)


def _divide_words(x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of uint64 stored as int64; x1 of 2**63 or more goes into x0 at most once.

    Otherwise half of x0 divided, doubled, is one less at most (Warren, Hacker's Delight, 9-3).
    """
    safe = torch.where(x1 <= 0, 1, x1)
    quotient = torch.div((x0 >> 1) & (2**63 - 1), safe, rounding_mode="trunc") << 1
    quotient = torch.where(x1 < 0, 0, quotient)
    rest = x0 - quotient * x1
    more = rest.bitwise_xor(_TOP) >= x1.bitwise_xor(_TOP)
    quotient, rest = torch.where(more, quotient + 1, quotient), torch.where(more, rest - x1, rest)
    return torch.where(x1 == 0, -1, quotient), torch.where(x1 == 0, x0, rest)


def bind_power(context: NodeContext) -> Kernel:
    """Modulo 2**bits; to a negative power 1 and -1 stay, 0 gives -1 (all bits, as division by zero), others 0."""
    dtype = context.dtype
    to = storage_dtype(dtype)

    def power(x0: Tensor, x1: Tensor) -> Tensor:
        base, exponent = integers(x0, dtype), integers(x1, dtype)
        result = _repeated_squares(base, exponent, dtype.bits)
        if _is_signed(dtype):
            odd = torch.where(exponent & 1 == 0, 1, -1)
            inverse = torch.where(base == 1, 1, torch.where(base == -1, odd, torch.where(base == 0, -1, 0)))
            result = torch.where(exponent < 0, inverse, result)
        return result.to(to)

    return power


def _repeated_squares(base: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """base**exponent modulo 2**64 for exponents of `bits` bits."""
    base, exponent = torch.broadcast_tensors(base, exponent)
    result = torch.ones_like(base)
    for bit in range(bits):
        result = torch.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result


def bind_shift_left(context: NodeContext) -> Kernel:
    """0 when x1 is not below the bits."""
    dtype = context.dtype

    def shift(x0: Tensor, x1: Tensor) -> Tensor:
        inside, amount = _amount(x1, dtype)
        return torch.where(inside, torch.bitwise_left_shift(x0, amount), 0)

    return shift


def bind_shift_right_arithmetic(context: NodeContext) -> Kernel:
    """Fills up with the highest bit, also of unsigned numbers."""
    dtype = context.dtype

    def shift(x0: Tensor, x1: Tensor) -> Tensor:
        inside, amount = _amount(x1, dtype)
        amount = torch.where(inside, amount, dtype.bits - 1)
        if dtype is DType.UINT8:
            return torch.bitwise_right_shift(x0.view(torch.int8), amount.view(torch.int8)).view(torch.uint8)
        return torch.bitwise_right_shift(x0, amount)

    return shift


def bind_shift_right_logical(context: NodeContext) -> Kernel:
    """Fills up with zeros."""
    dtype = context.dtype
    without_sign = 2 ** (dtype.bits - 1) - 1

    def shift(x0: Tensor, x1: Tensor) -> Tensor:
        inside, amount = _amount(x1, dtype)
        by_one = torch.bitwise_right_shift(x0, 1).bitwise_and(without_sign)
        shifted = torch.bitwise_right_shift(by_one, torch.where(amount == 0, 0, amount - 1))
        return torch.where(inside, torch.where(amount == 0, x0, shifted), 0)

    return shift


def _amount(x1: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """A mask of the shifts by fewer than all bits, and the amounts, 0 outside it. An unsigned amount with its top
    bit set is out of range."""
    inside = (x1 >= 0) & (x1 < dtype.bits)
    return inside, torch.where(inside, x1, 0)


def _bits(x: Tensor, dtype: DType) -> Tensor:
    """The bits in an int64, zeros above them."""
    wide = x.to(torch.int64)
    return wide if dtype.bits == 64 else wide.bitwise_and(2**dtype.bits - 1)


def bind_bit_count(context: NodeContext) -> Kernel:
    """How many bits are one."""
    dtype = context.dtype
    return lambda x: _ones(_bits(x, dtype)).to(x.dtype)


def bind_clz(context: NodeContext) -> Kernel:
    """How many of the highest bits are zero: all but those at and below the highest one."""
    dtype = context.dtype

    def clz(x: Tensor) -> Tensor:
        filled = _bits(x, dtype)
        for step in (1, 2, 4, 8, 16, 32):
            # Arithmetic shifts of a negative number fill it with ones, which is what is wanted.
            filled = filled | (filled >> step)
        return (dtype.bits - _ones(filled)).to(x.dtype)

    return clz


def _ones(x: Tensor) -> Tensor:
    """The ones in each int64, by adding neighbours (Warren, Hacker's Delight, 5-1)."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0x7F
