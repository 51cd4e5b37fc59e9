"""Operations on elements of floats, complex numbers and bool, and the table of all on elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.backends.aten import integer
from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.storage_dtypes import held, is_float8, is_word, narrow, swapped, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType


def plain(function: Kernel) -> Binder:
    """`function`, of float8 in float32 and rounded once."""

    def bind(context: NodeContext) -> Kernel:
        dtype = context.dtype
        if not is_float8(dtype):
            return function
        back: Callable[[Tensor], Tensor] = (
            (lambda x: narrow(x, dtype)) if is_float8(context.output.dtype) else lambda x: x
        )
        return lambda *xs: back(function(*(wide(x, dtype) for x in xs)))

    return bind


def widened(function: Kernel) -> Binder:
    """`function`, of all narrow floats in float32 and rounded once: for those of several roundings."""

    def bind(context: NodeContext) -> Kernel:
        dtype = context.dtype
        if not dtype.is_float or dtype.size >= 4:
            return function
        back: Callable[[Tensor], Tensor] = (
            (lambda x: x) if context.output.dtype is DType.BOOL else lambda x: narrow(x, dtype)
        )
        return lambda *xs: back(function(*(wide(x, dtype) for x in xs)))

    return bind


def by_kind(floats: Binder, integers: Binder) -> Binder:
    """One binder for floats, complex numbers and bool, another for integers."""
    return lambda context: (integers if context.dtype.is_integer else floats)(context)


def ordered(function: Kernel) -> Binder:
    """A function of two or more operands that compares them and gives one of them, or bool."""

    def bind(context: NodeContext) -> Kernel:
        swap = swapped(context.dtype)
        if not is_word(context.dtype):
            return plain(function)(context)
        if context.output.dtype is DType.BOOL:
            return lambda *xs: function(*map(swap, xs))
        return lambda *xs: swap(function(*map(swap, xs)))

    return bind


def _total(function: Kernel) -> Binder:
    """Compared in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN: their bits, turned round below zero."""

    def bind(context: NodeContext) -> Kernel:
        ordinals = ordinals_of(context.dtype)
        return lambda x0, x1: function(ordinals(x0), ordinals(x1))

    return bind


def ordinals_of(dtype: DType) -> Callable[[Tensor], Tensor]:
    """Signed integers in the total order of floats."""
    bits_type = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.size]
    below = 2 ** (dtype.bits - 1) - 1

    def ordinals(x: Tensor) -> Tensor:
        bits = x.view(bits_type)
        return bits.bitwise_xor((bits >> (dtype.bits - 1)) & below)

    return ordinals


def _sign(x: Tensor) -> Tensor:
    if x.is_complex():
        # Divided by the larger part first: the modulus of the smallest and the largest numbers is not one of them.
        large = torch.maximum(x.real.abs(), x.imag.abs())
        scale = torch.where(large == 0, 1, large)
        real, imaginary = x.real / scale, x.imag / scale
        size = torch.where(large == 0, 1, torch.hypot(real, imaginary))
        return torch.complex(
            torch.where(large == 0, x.real, real / size), torch.where(large == 0, x.imag, imaginary / size)
        )
    return torch.where((x == 0) | x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def _by_parts(function: Kernel) -> Kernel:
    """Of complex numbers part by part: torch multiplies one operand by the complex number 1, and 0 * inf is NaN."""

    def computed(x0: Tensor, x1: Tensor) -> Tensor:
        if not x0.is_complex():
            return function(x0, x1)  # type: ignore[no-any-return]
        return torch.complex(function(x0.real, x1.real), function(x0.imag, x1.imag))

    return computed


def _remainder(x0: Tensor, x1: Tensor) -> Tensor:
    """fmod, whose vectorized kernels give NaN where the quotient overflows: float32 divides in float64, and float64
    first by multiples of x1, which have the same remainder."""
    if x0.dtype != torch.float64:
        return torch.fmod(x0.to(torch.float64), x1.to(torch.float64)).to(x0.dtype)
    once = x1 * 2.0**700
    return torch.fmod(torch.fmod(torch.fmod(x0, once * 2.0**700), once), x1)


def _log1p(x: Tensor) -> Tensor:
    if not x.is_complex():
        return torch.log1p(x)
    wide = x.to(torch.complex128)
    real, imaginary = wide.real, wide.imag
    shifted = 1 + real
    large, small = torch.maximum(shifted.abs(), imaginary.abs()), torch.minimum(shifted.abs(), imaginary.abs())
    # log |1 + x| without squares that overflow or vanish.
    ratio = torch.where(large == 0, 0, small / torch.where(large == 0, 1, large))
    far = torch.log(large) + torch.log1p(ratio * ratio) / 2
    far = torch.where(real.isinf() | imaginary.isinf(), torch.inf, far)
    near = torch.hypot(real, imaginary) < 0.5
    square = torch.where(near, real * (2 + real) + imaginary * imaginary, 0)
    found = torch.complex(torch.where(near, torch.log1p(square) / 2, far), torch.atan2(imaginary, shifted))
    return found.to(x.dtype)


def _expm1(x: Tensor) -> Tensor:
    """Of complex numbers e^a cos b - 1, of which neither part is taken away from one; b = 0 stays so."""
    if not x.is_complex():
        return torch.expm1(x)
    wide_ = x.to(torch.complex128)
    a, b = wide_.real, wide_.imag
    near = torch.complex(torch.expm1(a) * torch.cos(b) - 2 * torch.sin(b / 2) ** 2, torch.exp(a) * torch.sin(b))
    # e^a alone may be infinite where e^a cos b is not; from 40 on the 1 is below the last digit.
    root = torch.exp(a / 2)
    found = torch.where(a > 40, torch.complex(root * torch.cos(b) * root, root * torch.sin(b) * root), near)
    return torch.where(b == 0, torch.complex(torch.expm1(a), b), found).to(x.dtype)


def _logistic(x: Tensor) -> Tensor:
    """Of complex numbers by the power that does not overflow."""
    if not x.is_complex():
        return torch.sigmoid(x)
    positive = x.real >= 0
    small = torch.exp(torch.where(positive, -x, x))
    return torch.where(positive, 1, small) / (1 + small)


def _part(name: str) -> Binder:
    def bind(context: NodeContext) -> Kernel:
        if context.dtype.is_complex:
            return getattr(torch, name)  # type: ignore[no-any-return]
        return torch.zeros_like if name == "imag" else lambda x: x

    return bind


def _complex(x0: Tensor, x1: Tensor) -> Tensor:
    return torch.complex(*torch.broadcast_tensors(x0, x1))


def _divide_complex(x0: Tensor, x1: Tensor) -> Tensor:
    """Of complex numbers by Smith's method (1962), as in NumPy: torch's own leaves more of what cancels out."""
    upper, lower = x1.real, x1.imag
    turned = upper.abs() < lower.abs()
    large, small = torch.where(turned, lower, upper), torch.where(turned, upper, lower)
    ratio = small / large
    scale = 1 / (large + small * ratio)
    first, second = torch.where(turned, x0.imag, x0.real), torch.where(turned, x0.real, x0.imag)
    real, imaginary = (first + second * ratio) * scale, (second - first * ratio) * scale
    none = large == 0
    size = large.abs()
    return torch.complex(
        torch.where(none, x0.real / size, real),
        torch.where(none, x0.imag / size, torch.where(turned, -imaginary, imaginary)),
    )


def _bind_divide(context: NodeContext) -> Kernel:
    return _divide_complex if context.dtype.is_complex else plain(torch.div)(context)


def _power_complex64(x0: Tensor, x1: Tensor) -> Tensor:
    # By a logarithm of the element type it would lose three of its seven digits.
    return torch.pow(x0.to(torch.complex128), x1.to(torch.complex128)).to(torch.complex64)


def _bind_power(context: NodeContext) -> Kernel:
    return _power_complex64 if context.dtype is DType.COMPLEX64 else widened(torch.pow)(context)


def _extreme(greatest: bool) -> Kernel:
    """Of complex numbers by the real part, then the imaginary one; NaN where either has one."""
    function = torch.maximum if greatest else torch.minimum

    def extreme(x0: Tensor, x1: Tensor) -> Tensor:
        if not x0.is_complex():
            return function(x0, x1)
        x0, x1 = torch.broadcast_tensors(x0, x1)
        beyond = torch.gt if greatest else torch.lt
        first = beyond(x0.real, x1.real) | ((x0.real == x1.real) & ~beyond(x1.imag, x0.imag)) | x0.isnan()
        return torch.where(first & ~(x1.isnan() & ~x0.isnan()), x0, x1)

    return extreme


def _cbrt(x: Tensor) -> Tensor:
    if x.is_complex():
        # By modulus and angle: the logarithm of a large number has few digits after the point.
        wide_ = x.to(torch.complex128)
        real, imaginary = wide_.real, wide_.imag
        large = torch.maximum(real.abs(), imaginary.abs()) > 1
        up, down = (torch.hypot(real * 2.0**power, imaginary * 2.0**power) for power in (300, -30))
        size = torch.where(large, _cbrt(down) * 2.0**10, _cbrt(up) * 2.0**-100)
        angle = torch.atan2(imaginary, real) / 3
        flat = angle == 0
        imaginary = torch.where(flat, angle, size * torch.sin(angle))
        return torch.complex(torch.where(flat, size, size * torch.cos(angle)), imaginary).to(x.dtype)
    exact = x.to(torch.float64)
    size = exact.abs()
    # Scaled into the normal numbers; a step of Newton's method then makes up for the rounded exponent.
    small = size < 1e-300
    root = torch.pow(torch.where(small, size * 2.0**300, size), 1 / 3)
    better = root - (root - torch.where(small, size * 2.0**300, size) / (root * root)) / 3
    plain_ = (size == 0) | ~torch.isfinite(size)
    found = torch.where(plain_, size, torch.where(small, better * 2.0**-100, better))
    return torch.copysign(found, exact).to(x.dtype)


def _atan2(x0: Tensor, x1: Tensor) -> Tensor:
    if not x0.is_complex():
        return torch.atan2(x0, x1)
    y, x = torch.view_as_real(x0.to(torch.complex128)), torch.view_as_real(x1.to(torch.complex128))
    # Divided by the largest part, whose square is a number then.
    large = torch.maximum(y.abs().amax(-1, keepdim=True), x.abs().amax(-1, keepdim=True))
    scale = torch.where((large > 0) & large.isfinite(), large, 1.0)
    y, x = torch.view_as_complex(y / scale), torch.view_as_complex(x / scale)
    return (-1j * torch.log((x + 1j * y) / torch.sqrt(x * x + y * y))).to(x0.dtype)


def _round_nearest_afz(x: Tensor) -> Tensor:
    rounded = x.trunc()
    size = rounded.abs()
    return torch.copysign(torch.where((x - rounded).abs() >= 0.5, size + 1, size), x)


def _reduce_precision(context: NodeContext) -> Kernel:
    """On the bits: a half of the last bit that stays is added, less one if that bit is even, and the rest cut off."""
    dtype = context.dtype
    info = torch.finfo(held(dtype))
    mantissa = round(-math.log2(info.eps))
    exponent = dtype.bits - 1 - mantissa
    word = {16: torch.int16, 32: torch.int32, 64: torch.int64}[dtype.bits]
    exponent_bits, mantissa_bits = context.attributes["exponent_bits"], context.attributes["mantissa_bits"]
    infinity = (1 << exponent) - 1 << mantissa
    bias, least = (1 << exponent - 1) - 1, (1 << min(exponent_bits, exponent) - 1) - 1

    def reduce(x: Tensor) -> Tensor:
        bits = x.view(word)
        sign, kept = bits & -(1 << dtype.bits - 1), bits & ((1 << dtype.bits - 1) - 1)
        nan = kept > infinity
        if mantissa_bits < mantissa:
            cut = mantissa - mantissa_bits
            kept = torch.where(nan, 0, kept)
            kept = (kept + ((kept >> cut) & 1) + ((1 << cut - 1) - 1)) & ~((1 << cut) - 1)
        if exponent_bits < exponent:
            kept = torch.where(kept >= bias + least + 1 << mantissa, infinity, kept)
            kept = torch.where(kept >> mantissa <= bias - least, 0, kept)
        return torch.where(nan, bits, sign | kept).view(x.dtype)

    return reduce


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def direct(function: Kernel) -> Binder:
    """For what carries its elements on as they are."""
    return lambda context: function


def same(x: Any) -> Any:
    """The operand itself."""
    return x


ELEMENTWISE: dict[OpType, Binder] = {
    OpType.IDENTITY: direct(same),
    OpType.ABS: plain(torch.abs),
    OpType.NEG: plain(torch.neg),
    OpType.SIGN: plain(_sign),
    OpType.CEIL: plain(torch.ceil),
    OpType.FLOOR: plain(torch.floor),
    OpType.ROUND: plain(torch.round),
    OpType.COS: plain(torch.cos),
    OpType.SIN: plain(torch.sin),
    OpType.ERF: widened(torch.erf),
    OpType.EXP: plain(torch.exp),
    OpType.EXPM1: plain(_expm1),
    OpType.LOG: plain(torch.log),
    OpType.LOG1P: plain(_log1p),
    OpType.LOGISTIC: plain(_logistic),
    OpType.RSQRT: plain(torch.rsqrt),
    OpType.SQRT: plain(torch.sqrt),
    OpType.TANH: plain(torch.tanh),
    OpType.TAN: widened(torch.tan),
    OpType.CBRT: widened(_cbrt),
    OpType.ROUND_NEAREST_AFZ: plain(_round_nearest_afz),
    OpType.REDUCE_PRECISION: _reduce_precision,
    OpType.REAL: _part("real"),
    OpType.IMAG: _part("imag"),
    OpType.CONJ: direct(torch.conj_physical),
    OpType.IS_FINITE: plain(torch.isfinite),
    OpType.IS_NAN: plain(torch.isnan),
    OpType.LOGICAL_NOT: direct(torch.logical_not),
    OpType.BITWISE_NOT: direct(torch.bitwise_not),
    OpType.BIT_COUNT: integer.bind_bit_count,
    OpType.CLZ: integer.bind_clz,
    OpType.ADD: plain(_by_parts(torch.add)),
    OpType.SUB: plain(_by_parts(torch.sub)),
    OpType.MUL: plain(torch.mul),
    OpType.DIV: by_kind(_bind_divide, integer.bind_divide),
    OpType.REM: by_kind(widened(_remainder), integer.bind_remainder),
    OpType.POW: by_kind(_bind_power, integer.bind_power),
    OpType.MAX: ordered(_extreme(greatest=True)),
    OpType.MIN: ordered(_extreme(greatest=False)),
    OpType.ATAN2: widened(_atan2),
    OpType.BITWISE_AND: direct(torch.bitwise_and),
    OpType.BITWISE_OR: direct(torch.bitwise_or),
    OpType.BITWISE_XOR: direct(torch.bitwise_xor),
    OpType.SHIFT_LEFT: integer.bind_shift_left,
    OpType.SHIFT_RIGHT_ARITHMETIC: integer.bind_shift_right_arithmetic,
    OpType.SHIFT_RIGHT_LOGICAL: integer.bind_shift_right_logical,
    OpType.LOGICAL_AND: direct(torch.logical_and),
    OpType.LOGICAL_OR: direct(torch.logical_or),
    OpType.LOGICAL_XOR: direct(torch.logical_xor),
    OpType.COMPLEX: direct(_complex),
    OpType.EQUAL: plain(torch.eq),
    OpType.NOT_EQUAL: plain(torch.ne),
    OpType.LESS_THAN: ordered(torch.lt),
    OpType.LESS_OR_EQUAL: ordered(torch.le),
    OpType.GREATER_THAN: ordered(torch.gt),
    OpType.GREATER_OR_EQUAL: ordered(torch.ge),
    OpType.EQUAL_TOTAL_ORDER: _total(torch.eq),
    OpType.NOT_EQUAL_TOTAL_ORDER: _total(torch.ne),
    OpType.LESS_THAN_TOTAL_ORDER: _total(torch.lt),
    OpType.LESS_OR_EQUAL_TOTAL_ORDER: _total(torch.le),
    OpType.GREATER_THAN_TOTAL_ORDER: _total(torch.gt),
    OpType.GREATER_OR_EQUAL_TOTAL_ORDER: _total(torch.ge),
    OpType.CLAMP: ordered(_clamp),
    OpType.WHERE: direct(torch.where),
}
