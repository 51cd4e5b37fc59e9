"""Operations on elements of floats, complex numbers and bool, and the table of all on elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.backends.dtypes import DType
from easytorch.backends.torch_ops import whole
from easytorch.backends.torch_ops.carriers import is_float8, is_word, narrow, swapped, wide
from easytorch.backends.torch_ops.conversion import bind_bitcast, bind_convert
from easytorch.backends.torch_ops.site import Binder, Kernel, Site
from easytorch.backends.types import OpType


def plain(function: Kernel) -> Binder:
    """`function`, of float8 in float32 and rounded once."""

    def bind(site: Site) -> Kernel:
        dtype = site.dtype
        if not is_float8(dtype):
            return function
        back: Callable[[Tensor], Tensor] = (lambda x: narrow(x, dtype)) if is_float8(site.output.dtype) else lambda x: x
        return lambda *xs: back(function(*(wide(x, dtype) for x in xs)))

    return bind


def widened(function: Kernel) -> Binder:
    """`function`, of all narrow floats in float32 and rounded once: for those of several roundings."""

    def bind(site: Site) -> Kernel:
        dtype = site.dtype
        if not dtype.is_float or dtype.size >= 4:
            return function
        back: Callable[[Tensor], Tensor] = (
            (lambda x: x) if site.output.dtype is DType.BOOL else lambda x: narrow(x, dtype)
        )
        return lambda *xs: back(function(*(wide(x, dtype) for x in xs)))

    return bind


def by_kind(floats: Binder, integers: Binder) -> Binder:
    """One binder for floats, complex numbers and bool, another for integers."""
    return lambda site: (integers if site.dtype.is_integer else floats)(site)


def ordered(function: Kernel) -> Binder:
    """A function of two or more operands that compares them and gives one of them, or bool."""

    def bind(site: Site) -> Kernel:
        swap = swapped(site.dtype)
        if not is_word(site.dtype):
            return plain(function)(site)
        if site.output.dtype is DType.BOOL:
            return lambda *xs: function(*map(swap, xs))
        return lambda *xs: swap(function(*map(swap, xs)))

    return bind


def _total(function: Kernel) -> Binder:
    """Compared in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN: their bits, turned round below zero."""

    def bind(site: Site) -> Kernel:
        ordinals = ordinals_of(site.dtype)
        return lambda x0, x1: function(ordinals(x0), ordinals(x1))

    return bind


def ordinals_of(dtype: DType) -> Callable[[Tensor], Tensor]:
    """Signed integers in the total order of floats."""
    bits_type = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.size]
    below = 2 ** (dtype.bits - 1) - 1

    def ordinals(x: Tensor) -> Tensor:
        bits = x.view(bits_type)
        return bits ^ ((bits >> (dtype.bits - 1)) & below)

    return ordinals


def _sign(x: Tensor) -> Tensor:
    if x.is_complex():
        size = x.abs()
        return torch.where(size == 0, x, x / torch.where(size == 0, 1, size))
    return torch.where((x == 0) | x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def _part(name: str) -> Binder:
    def bind(site: Site) -> Kernel:
        if site.dtype.is_complex:
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
    return torch.complex(real, torch.where(turned, -imaginary, imaginary))


def _bind_divide(site: Site) -> Kernel:
    return _divide_complex if site.dtype.is_complex else plain(torch.div)(site)


def _power_complex64(x0: Tensor, x1: Tensor) -> Tensor:
    # By a logarithm of the element type it would lose three of its seven digits.
    return torch.pow(x0.to(torch.complex128), x1.to(torch.complex128)).to(torch.complex64)


def _bind_power(site: Site) -> Kernel:
    return _power_complex64 if site.dtype is DType.COMPLEX64 else widened(torch.pow)(site)


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def direct(function: Kernel) -> Binder:
    """For what carries its elements on as they are."""
    return lambda site: function


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
    OpType.ERF: plain(torch.erf),
    OpType.EXP: plain(torch.exp),
    OpType.EXPM1: plain(torch.expm1),
    OpType.LOG: plain(torch.log),
    OpType.LOG1P: plain(torch.log1p),
    OpType.LOGISTIC: plain(torch.sigmoid),
    OpType.RSQRT: plain(torch.rsqrt),
    OpType.SQRT: plain(torch.sqrt),
    OpType.TANH: plain(torch.tanh),
    OpType.REAL: _part("real"),
    OpType.IMAG: _part("imag"),
    OpType.CONJ: direct(torch.conj_physical),
    OpType.IS_FINITE: plain(torch.isfinite),
    OpType.IS_NAN: plain(torch.isnan),
    OpType.LOGICAL_NOT: direct(torch.logical_not),
    OpType.BITWISE_NOT: direct(torch.bitwise_not),
    OpType.BIT_COUNT: whole.bind_bit_count,
    OpType.CLZ: whole.bind_clz,
    OpType.ADD: plain(torch.add),
    OpType.SUB: plain(torch.sub),
    OpType.MUL: plain(torch.mul),
    OpType.DIV: by_kind(_bind_divide, whole.bind_divide),
    OpType.REM: by_kind(widened(torch.fmod), whole.bind_remainder),
    OpType.POW: by_kind(_bind_power, whole.bind_power),
    OpType.MAX: ordered(torch.maximum),
    OpType.MIN: ordered(torch.minimum),
    OpType.ATAN2: widened(torch.atan2),
    OpType.BITWISE_AND: direct(torch.bitwise_and),
    OpType.BITWISE_OR: direct(torch.bitwise_or),
    OpType.BITWISE_XOR: direct(torch.bitwise_xor),
    OpType.SHIFT_LEFT: whole.bind_shift_left,
    OpType.SHIFT_RIGHT_ARITHMETIC: whole.bind_shift_right_arithmetic,
    OpType.SHIFT_RIGHT_LOGICAL: whole.bind_shift_right_logical,
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
    OpType.CONVERT_DTYPE: bind_convert,
    OpType.BITCAST: bind_bitcast,
}
