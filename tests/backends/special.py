"""Special values through every operation on elements: NumPy against mpmath, the other backends against NumPy.

Loaded by its path, from tests/backends/test_special.py and scripts/fuzz_backends.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from easytorch import backends
from easytorch.backends import OpNotImplementedError, make_shape
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.shapeinference.elementwise import RULES
from easytorch.backends.types import OpType

# With further arguments, or of several types.
_OTHERS = {OpType.COMPLEX, OpType.CLAMP, OpType.WHERE, OpType.REDUCE_PRECISION}
OPS = tuple(op_type for op_type in RULES if op_type not in _OTHERS)
# Products and powers of complex numbers whose parts overflow, and what is made of them: backends differ in what is NaN
# and what infinite (docs/backends.md).
_OVERFLOWING = {OpType.MUL, OpType.DIV, OpType.RSQRT}
# By which side of a cut a rounding leaves an intermediate result, or by the last bit of a large exponent.
_ILL = {OpType.POW, OpType.ATAN2, OpType.TAN, OpType.LOGISTIC}
# Larger than one vector and one block of every kernel, and no multiple of either.
LARGE = 40_003
ROUNDINGS = 24


def real_values(dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Zeros, ends, subnormal numbers, infinities, NaN, where functions overflow, and some at random."""
    info = ml_dtypes.finfo(dtype.numpy)
    least, most, eps, below = (float(x) for x in (info.smallest_normal, info.max, info.eps, info.smallest_subnormal))
    values = [0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 10.0, 100.0, 1e-3, np.pi, np.pi / 2, np.e, least, below, least / 2, most]
    values += [most / 2, eps, eps / 2, 1 + eps, np.inf, most**0.5, 2 * most**0.5, least**0.5, 88.8, 104.0, 709.9, 745.2]
    values += [1e5, 1e10, *np.exp(rng.uniform(np.log(least), np.log(most), 4)), *rng.uniform(0, 4, 4)]
    with np.errstate(all="ignore"):
        both = np.array([*values, *(-value for value in values), np.nan], np.float64)
        return (both.astype(np.float32) if dtype.size < 4 else both).astype(dtype.numpy)


def values(dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Of complex numbers every part with every other of some."""
    if not dtype.is_complex:
        return real_values(dtype, rng)
    parts = real_values(dtype.real, rng)
    parts = np.unique(np.concatenate([parts[[0, 1, 2, 12, 13, 15, 20, -1]], rng.choice(parts, 10)]))
    parts = np.concatenate([parts, [np.array(-0.0, parts.dtype)]])
    real, imaginary = np.meshgrid(parts, parts)
    found = np.empty(real.size, dtype.numpy)
    found.real, found.imag = real.ravel(), imaginary.ravel()
    return found


def operands(op_type: OpType, dtype: DType, seed: int, count: int | None = None) -> list[np.ndarray]:
    """Every value, or every pair; at most, or by repeating them exactly, `count`."""
    rng = np.random.default_rng([seed, int(op_type)])
    found = values(dtype, rng)
    arrays = [found]
    if len(inspect.signature(getattr(backends.Builder, op_type.method)).parameters) == 3:
        arrays = [np.repeat(found, len(found)), np.tile(found, len(found))]
    if len(arrays[0]) > 4000:
        kept = rng.choice(len(arrays[0]), 4000, replace=False)
        arrays = [array[kept] for array in arrays]
    return arrays if count is None else [np.resize(array, count) for array in arrays]


def run(backend: backends.Backend, op_type: OpType, arrays: list[np.ndarray]) -> np.ndarray:
    """The operation of the arrays."""
    b = backend.builder(op_type.method)
    ops = [b.parameter(f"x{n}", make_shape(array.dtype, array.shape)) for n, array in enumerate(arrays)]
    program = b.compile(getattr(b, op_type.method)(*ops))
    (found,) = program.execute([backend.buffer_from_numpy(array) for array in arrays])
    return backend.buffer_to_numpy(found)


def wrong(found: np.ndarray, wanted: np.ndarray, roundings: int = ROUNDINGS) -> np.ndarray:
    """Where they differ by more than so many roundings: of complex numbers relative to the modulus."""
    dtype = dtype_of(wanted.dtype)
    if not (dtype.is_float or dtype.is_complex):
        return np.asarray(found != wanted)
    info = ml_dtypes.finfo(dtype.real.numpy)
    parts = [(found, wanted)] if dtype.is_float else [(found.real, wanted.real), (found.imag, wanted.imag)]
    with np.errstate(all="ignore"):
        wide = [(one.astype(np.float64), other.astype(np.float64)) for one, other in parts]
        size = np.maximum.reduce([np.where(np.isfinite(other), np.abs(other), 0) for _, other in wide])
        bound = float(info.eps) * roundings * size + float(info.smallest_normal)
        good = np.ones(found.shape, bool)
        for one, other in wide:
            near = (one == other) | (np.isnan(one) & np.isnan(other)) | (np.abs(one - other) <= bound)
            # The last number before infinity, rounded the other way.
            good &= near | (np.isinf(one) & (np.abs(other) > 0.9999 * float(info.max)))
        return ~good


def _is_plain(array: np.ndarray, with_subnormal: bool) -> np.ndarray:
    """No part infinite or NaN, nor, unless asked for, subnormal."""
    dtype = dtype_of(array.dtype)
    parts = (array.real, array.imag) if dtype.is_complex else (array,)
    least = float(ml_dtypes.finfo(dtype.real.numpy).smallest_normal) if dtype.is_float or dtype.is_complex else 0
    good = np.ones(array.shape, bool)
    for part in parts:
        size = np.abs(part.astype(np.float64))
        good &= np.isfinite(size) & (with_subnormal | (size == 0) | (size >= least))
    return good


def _products_fit(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    """Whether no product of a part of one and a part of the other overflows: a fused one that is added up may not."""
    with np.errstate(all="ignore"):
        sizes = [np.maximum(np.abs(x.real), np.abs(x.imag)) for x in (x0, x1)]
        return np.asarray(sizes[0] * sizes[1] < np.finfo(sizes[0].dtype).max)


def _is_normal(array: np.ndarray) -> np.ndarray:
    """No subnormal part: XLA takes them for zeros on a CPU."""
    dtype = dtype_of(array.dtype)
    if not (dtype.is_float or dtype.is_complex):
        return np.ones(array.shape, bool)
    least = float(ml_dtypes.finfo(dtype.real.numpy).smallest_normal)
    parts = (array.real, array.imag) if dtype.is_complex else (array,)
    with np.errstate(all="ignore"):
        return np.all([(part == 0) | ~(np.abs(part.astype(np.float64)) < least) for part in parts], axis=0)


def differences(config: str, op_type: OpType, seed: int, count: int | None) -> Iterator[str]:
    """What a backend gives otherwise than NumPy, for every element type it holds."""
    backend, reference = backends.new(config), backends.new("numpy")
    for dtype in sorted(accepted_dtypes(op_type)):
        if not (dtype.is_float or dtype.is_complex):
            continue
        arrays = operands(op_type, dtype, seed, count)
        wanted = run(reference, op_type, arrays)
        try:
            found = run(backend, op_type, arrays)
        except OpNotImplementedError:
            continue
        bad = wrong(found, wanted)
        if dtype.is_complex and op_type in _ILL:
            continue
        if dtype.is_complex:
            # Infinite and NaN parts are defined where no product is taken of them.
            exempt = op_type in _OVERFLOWING or config != "torch"
            if exempt:
                bad &= np.all([_is_plain(array, True) for array in (*arrays, wanted)], axis=0)
            if op_type is OpType.MUL:
                bad &= _products_fit(*arrays)
        if config != "torch":
            bad &= np.all([_is_normal(array) for array in (*arrays, wanted)], axis=0)
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            given = ", ".join(repr(array[place]) for array in arrays)
            yield (
                f"{config} {op_type} {dtype}, seed {seed}, {len(bad)} elements: {int(bad.sum())} wrong, first "
                f"{op_type.method}({given}) = {found[place]!r}, not {wanted[place]!r}"
            )


def _exact(op_type: OpType, *numbers: Any) -> Any:
    import mpmath as mp

    if op_type is OpType.LOG1P and isinstance(numbers[0], mp.mpc):
        return mp.log(1 + numbers[0])
    functions = {
        **{op: getattr(mp, op.method) for op in (OpType.SIN, OpType.COS, OpType.TAN, OpType.EXP, OpType.EXPM1)},
        **{op: getattr(mp, op.method) for op in (OpType.LOG, OpType.SQRT, OpType.TANH, OpType.CBRT, OpType.ERF)},
        OpType.LOG1P: mp.log1p,
        OpType.RSQRT: lambda x: 1 / mp.sqrt(x),
        OpType.LOGISTIC: lambda x: 1 / (1 + mp.exp(-x)),
        OpType.ABS: abs,
        OpType.SIGN: mp.sign,
        OpType.ATAN2: mp.atan2,
        OpType.ADD: lambda x, y: x + y,
        OpType.SUB: lambda x, y: x - y,
        OpType.MUL: lambda x, y: x * y,
        OpType.DIV: lambda x, y: x / y,
        OpType.POW: lambda x, y: x**y,
        OpType.REM: lambda x, y: mp.sign(x) * mp.fmod(abs(x), abs(y)),
    }
    return functions[op_type](*numbers)


EXACT = (
    *(OpType.SIN, OpType.COS, OpType.TAN, OpType.EXP, OpType.EXPM1, OpType.LOG, OpType.SQRT, OpType.TANH, OpType.CBRT),
    *(OpType.ERF, OpType.LOG1P, OpType.RSQRT, OpType.LOGISTIC, OpType.ABS, OpType.SIGN, OpType.ATAN2, OpType.ADD),
    *(OpType.SUB, OpType.MUL, OpType.DIV, OpType.POW, OpType.REM),
)
_EXACT_COMPLEX = (
    *(OpType.SIN, OpType.COS, OpType.EXP, OpType.EXPM1, OpType.LOG, OpType.SQRT, OpType.TANH, OpType.LOG1P),
    *(OpType.ABS, OpType.SIGN, OpType.ADD, OpType.SUB, OpType.CBRT),
)


def inexact(op_type: OpType, seed: int, count: int) -> Iterator[str]:
    """What NumPy gives otherwise than mpmath, of finite numbers whose result is in range."""
    import mpmath as mp

    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128):
        if dtype not in accepted_dtypes(op_type) or (dtype.is_complex and op_type not in _EXACT_COMPLEX):
            continue
        rng = np.random.default_rng([seed, int(op_type), dtype.size])
        arrays = operands(op_type, dtype, seed)
        good = np.all([_is_plain(array, True) for array in arrays], axis=0)
        # mpmath has no -0, which decides on which side of a cut a number is; its remainder by 0 is another.
        parts = [part for array in arrays for part in ((array.real, array.imag) if dtype.is_complex else (array,))]
        good &= ~np.any([(part == 0) & np.signbit(part) for part in parts], axis=0)
        good &= (arrays[-1] != 0) | (op_type is not OpType.REM)
        kept = rng.permutation(np.flatnonzero(good))[:count]
        arrays = [array[kept] for array in arrays]
        found = run(backends.new("numpy"), op_type, arrays)
        info = np.finfo(dtype.real.numpy)
        # sin(1e308) needs its argument's 1024 bits, and those of its result.
        with mp.workprec(2300 if dtype.size > 4 else 400):
            for place, numbers in enumerate(zip(*(array.tolist() for array in arrays), strict=True)):
                try:
                    exact = mp.mpmathify(_exact(op_type, *map(mp.mpmathify, numbers)))
                except (ZeroDivisionError, ValueError, OverflowError):
                    continue
                if not dtype.is_complex and mp.im(exact):
                    continue
                size = max(abs(mp.re(exact)), abs(mp.im(exact)))
                if not mp.isfinite(size) or size > float(info.max):
                    continue
                # Powers of e are by the argument's last bit, which is not exact for a product or a quotient.
                bound = 8 * float(info.eps) * size + float(info.smallest_normal)
                given = complex(found[place])
                parts = (given.real - mp.re(exact), given.imag - mp.im(exact))
                if not all(np.isfinite(part) for part in (given.real, given.imag)) or max(map(abs, parts)) > bound:
                    yield f"numpy {op_type} {dtype}, seed {seed}: {op_type.method}{numbers} = {given}, not {exact}"[
                        :300
                    ]
                    break
