"""Operations on elements: every type they take, the edges of each, broadcasting, scalars and nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from backend_samples.make import INTEGERS, Sample, edges, ends, modular, normal, pairs

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.types import OpType

# The jax.lax function of the same meaning, by name; those with another name or signature stand below.
_LAX = {
    **{op: op.name.lower() for op in (OpType.ABS, OpType.NEG, OpType.SIGN, OpType.CEIL, OpType.FLOOR, OpType.COS)},
    **{op: op.name.lower() for op in (OpType.SIN, OpType.ERF, OpType.EXP, OpType.EXPM1, OpType.LOG, OpType.LOG1P)},
    **{op: op.name.lower() for op in (OpType.LOGISTIC, OpType.RSQRT, OpType.SQRT, OpType.TANH, OpType.IS_FINITE)},
    **{op: op.name.lower() for op in (OpType.ADD, OpType.SUB, OpType.MUL, OpType.DIV, OpType.REM, OpType.POW)},
    **{op: op.name.lower() for op in (OpType.MAX, OpType.MIN, OpType.ATAN2, OpType.COMPLEX, OpType.CLAMP)},
    **{op: op.name.lower() for op in (OpType.BITWISE_NOT, OpType.BITWISE_AND, OpType.BITWISE_OR, OpType.BITWISE_XOR)},
    **{op: op.name.lower() for op in (OpType.TAN, OpType.CBRT)},
    OpType.LOGICAL_NOT: "bitwise_not",
    OpType.LOGICAL_AND: "bitwise_and",
    OpType.LOGICAL_OR: "bitwise_or",
    OpType.LOGICAL_XOR: "bitwise_xor",
    OpType.EQUAL: "eq",
    OpType.NOT_EQUAL: "ne",
    OpType.LESS_THAN: "lt",
    OpType.LESS_OR_EQUAL: "le",
    OpType.GREATER_THAN: "gt",
    OpType.GREATER_OR_EQUAL: "ge",
}
_UNARY = (
    *(OpType.ABS, OpType.NEG, OpType.SIGN, OpType.CEIL, OpType.FLOOR, OpType.ROUND, OpType.COS, OpType.SIN),
    *(OpType.ERF, OpType.EXP, OpType.EXPM1, OpType.LOG, OpType.LOG1P, OpType.LOGISTIC, OpType.RSQRT, OpType.SQRT),
    *(OpType.TANH, OpType.REAL, OpType.IMAG, OpType.CONJ, OpType.IS_FINITE, OpType.IS_NAN, OpType.LOGICAL_NOT),
    *(OpType.BITWISE_NOT, OpType.BIT_COUNT, OpType.CLZ, OpType.IDENTITY),
    *(OpType.TAN, OpType.CBRT, OpType.ROUND_NEAREST_AFZ),
)
_TOTAL = {
    OpType.EQUAL_TOTAL_ORDER: lambda one, other: one == other,
    OpType.NOT_EQUAL_TOTAL_ORDER: lambda one, other: one != other,
    OpType.LESS_THAN_TOTAL_ORDER: lambda one, other: one < other,
    OpType.LESS_OR_EQUAL_TOTAL_ORDER: lambda one, other: one <= other,
    OpType.GREATER_THAN_TOTAL_ORDER: lambda one, other: one > other,
    OpType.GREATER_OR_EQUAL_TOTAL_ORDER: lambda one, other: one >= other,
}
_SHIFTS = (OpType.SHIFT_LEFT, OpType.SHIFT_RIGHT_ARITHMETIC, OpType.SHIFT_RIGHT_LOGICAL)
_BINARY = (
    *(OpType.ADD, OpType.SUB, OpType.MUL, OpType.DIV, OpType.REM, OpType.POW, OpType.MAX, OpType.MIN, OpType.ATAN2),
    *(OpType.BITWISE_AND, OpType.BITWISE_OR, OpType.BITWISE_XOR, *_SHIFTS, OpType.COMPLEX),
    *(OpType.LOGICAL_AND, OpType.LOGICAL_OR, OpType.LOGICAL_XOR, OpType.EQUAL, OpType.NOT_EQUAL, OpType.LESS_THAN),
    *(OpType.LESS_OR_EQUAL, OpType.GREATER_THAN, OpType.GREATER_OR_EQUAL, *_TOTAL),
)
_EXACT = {
    *(OpType.ROUND_NEAREST_AFZ, OpType.REDUCE_PRECISION),
    *(OpType.NEG, OpType.CEIL, OpType.FLOOR, OpType.ROUND, OpType.REAL, OpType.IMAG, OpType.CONJ, OpType.IDENTITY),
    *(OpType.COMPLEX, OpType.CLAMP, OpType.WHERE, OpType.BITCAST, OpType.CONVERT_DTYPE),
}


def _is_exact(op_type: OpType, dtype: DType) -> bool:
    return op_type in _EXACT or not (dtype.is_float or dtype.is_complex)


def _round(x: Any) -> Any:
    from jax import lax

    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _round_away(x: Any) -> Any:
    from jax import lax

    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


def _cbrt(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.power(x, 1 / 3) if jnp.iscomplexobj(x) else jnp.cbrt(x)


def _atan2(x0: Any, x1: Any) -> Any:
    """Of complex numbers by the arc tangent, on the side of the second axis that x1 is on."""
    import jax.numpy as jnp

    x0, x1 = jnp.broadcast_arrays(x0, x1)
    if not jnp.iscomplexobj(x0):
        return jnp.arctan2(x0, x1)
    # exp(i found) = (x1 + i x0) / sqrt(x1^2 + x0^2)
    return -1j * jnp.log((x1 + 1j * x0) / jnp.sqrt((x1 + 1j * x0) * (x1 - 1j * x0)))


def _extreme(name: str, x0: Any, x1: Any) -> Any:
    import jax.numpy as jnp

    x0, x1 = jnp.broadcast_arrays(x0, x1)
    if not jnp.iscomplexobj(x0):
        return getattr(jnp, name)(x0, x1)
    first = (x0.real > x1.real) | ((x0.real == x1.real) & (x0.imag >= x1.imag))
    return jnp.where(first if name == "maximum" else ~first, x0, x1)


def _is_nan(x: Any) -> Any:
    return x != x


def _part(x: Any, name: str) -> Any:
    import jax.numpy as jnp

    return getattr(jnp, name)(x)


def _in_jax(op_type: OpType) -> Callable[..., Any] | None:
    own = {
        OpType.ROUND: _round,
        OpType.ROUND_NEAREST_AFZ: _round_away,
        OpType.CBRT: _cbrt,
        OpType.ATAN2: _atan2,
        OpType.MAX: lambda *x: _extreme("maximum", *x),
        OpType.MIN: lambda *x: _extreme("minimum", *x),
        OpType.IS_NAN: _is_nan,
        OpType.IDENTITY: lambda x: x,
        OpType.REAL: lambda x: _part(x, "real"),
        OpType.IMAG: lambda x: _part(x, "imag"),
        OpType.CONJ: lambda x: _part(x, "conj"),
    }
    if op_type in own:
        return own[op_type]
    if op_type not in _LAX:
        return None

    def in_jax(*arrays: Any) -> Any:
        import jax.numpy as jnp
        from jax import lax

        if op_type in (OpType.ADD, OpType.MUL) and arrays[0].dtype == bool:
            return (jnp.logical_or if op_type is OpType.ADD else jnp.logical_and)(*arrays)
        if op_type is not OpType.CLAMP:
            arrays = jnp.broadcast_arrays(*arrays) if len(arrays) > 1 else arrays
        return getattr(lax, _LAX[op_type])(*arrays)

    return in_jax


def _unsigned(value: int, bits: int) -> int:
    return value % 2**bits


def _signed(value: int, bits: int) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def _by_integers(function: Callable[..., int]) -> Callable[..., np.ndarray]:
    """A function of Python integers and the number of bits, for every element."""

    def host(*arrays: np.ndarray) -> np.ndarray:
        dtype = dtype_of(arrays[0].dtype)
        wide = np.broadcast_arrays(*arrays)
        values = [
            function(*map(int, element), dtype.bits) for element in zip(*(array.flat for array in wide), strict=True)
        ]
        return modular(np.array(values, object).reshape(wide[0].shape), dtype)

    return host


def _shift_left(x: int, by: int, bits: int) -> int:
    return _unsigned(x, bits) << by if 0 <= by < bits else 0


def _shift_right_logical(x: int, by: int, bits: int) -> int:
    return _unsigned(x, bits) >> by if 0 <= by < bits else 0


def _shift_right_arithmetic(x: int, by: int, bits: int) -> int:
    return _signed(x, bits) >> (by if 0 <= by < bits else bits)


def _power(x: int, by: int, bits: int) -> int:
    if by >= 0:
        return pow(x, by, 2**bits)
    return {1: 1, -1: -1 if by % 2 else 1, 0: -1}.get(x, 0)


_IN_INTEGERS = {
    OpType.POW: _power,
    OpType.SHIFT_LEFT: _shift_left,
    OpType.SHIFT_RIGHT_LOGICAL: _shift_right_logical,
    OpType.SHIFT_RIGHT_ARITHMETIC: _shift_right_arithmetic,
    OpType.BIT_COUNT: lambda x, bits: _unsigned(x, bits).bit_count(),
    OpType.CLZ: lambda x, bits: bits - _unsigned(x, bits).bit_length(),
}


def _total(op_type: OpType) -> Callable[..., np.ndarray]:
    def key(value: Any) -> int:
        bits = int.from_bytes(value.tobytes(), "little")
        size = 8 * value.dtype.itemsize
        return -(bits - 2 ** (size - 1)) - 1 if bits >> (size - 1) else bits

    def host(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
        x0, x1 = np.broadcast_arrays(x0, x1)
        found = [_TOTAL[op_type](key(one), key(other)) for one, other in zip(x0.flat, x1.flat, strict=True)]
        return np.array(found, bool).reshape(x0.shape)

    return host


def _host(op_type: OpType) -> Callable[..., np.ndarray] | None:
    if op_type in _TOTAL:
        return _total(op_type)
    return _by_integers(_IN_INTEGERS[op_type]) if op_type in _IN_INTEGERS else None


def _sample(op_type: OpType, name: str, *inputs: np.ndarray) -> Sample:
    dtype = dtype_of(inputs[-1].dtype)
    by_integers = op_type in _IN_INTEGERS and dtype.is_integer
    return Sample(
        op_type,
        name,
        inputs,
        lambda b, *ops: getattr(b, op_type.method)(*ops),
        None if by_integers else _in_jax(op_type),
        _host(op_type) if by_integers or op_type in _TOTAL else None,
        _is_exact(op_type, dtype),
    )


def _simple(op_type: OpType) -> list[Sample]:
    unary = op_type in _UNARY
    found = []
    for dtype in sorted(accepted_dtypes(op_type)):
        inputs = (edges(dtype),) if unary else pairs(dtype)
        found.append(_sample(op_type, dtype, *inputs))
        found.append(
            _sample(op_type, f"{dtype}-random", *(normal(dtype, 2, 7, seed=seed) for seed in range(len(inputs))))
        )
    dtype = DType.FLOAT32 if DType.FLOAT32 in accepted_dtypes(op_type) else sorted(accepted_dtypes(op_type))[0]
    if unary:
        shapes = {"scalar": [()], "empty": [(0, 3)], "five axes": [(1, 2, 1, 2, 2)]}
    else:
        shapes = {
            "scalars": [(), ()],
            "scalar left": [(), (2, 3)],
            "scalar right": [(2, 3), ()],
            "repeated": [(3, 1, 2), (1, 4, 2)],
            "empty": [(0, 3), (1, 3)],
            "empty and scalar": [(2, 0), ()],
        }
    for name, dims in shapes.items():
        arrays = [normal(dtype, *sizes, seed=seed) for seed, sizes in enumerate(dims)]
        found.append(_sample(op_type, name, *arrays))
    return found


def _clamp() -> list[Sample]:
    found = []
    for dtype in sorted(accepted_dtypes(OpType.CLAMP)):
        low, x, high = (normal(dtype, 3, 4, seed=seed) for seed in range(3))
        found.append(_sample(OpType.CLAMP, dtype, low, x, high))
        found.append(_sample(OpType.CLAMP, f"{dtype}-scalars", low[0, 0], edges(dtype), high[0, 0]))
    return found


def _where() -> list[Sample]:
    found = []
    shapes = {
        "": ((2, 3), (2, 3), (2, 3)),
        " scalar condition": ((), (2, 3), (2, 3)),
        " scalars": ((2, 3), (), ()),
        " scalar": ((2, 1), (2, 3), ()),
        " repeated": ((2, 1), (1, 3), (2, 3)),
        " empty": ((0, 3), (), (1, 3)),
        " all scalars": ((), (), ()),
    }
    for dtype in DType:
        for name, dims in shapes.items() if dtype is DType.FLOAT32 else [("", shapes[""])]:
            arrays = (normal(DType.BOOL, *dims[0]), normal(dtype, *dims[1], seed=1), normal(dtype, *dims[2], seed=2))
            found.append(
                Sample(OpType.WHERE, dtype + name, arrays, lambda b, *x: b.where(*x), host=np.where, exact=True)
            )
    return found


def _converted(x: np.ndarray, dtype: DType) -> np.ndarray:
    """By Python's own integers, and ml_dtypes' rounding from float32 or float64."""
    source = dtype_of(x.dtype)
    if dtype is DType.BOOL:
        return np.array([bool(value != 0) for value in x.ravel().tolist()]).reshape(x.shape)
    if source.is_complex and not dtype.is_complex:
        x = x.real
    if dtype.is_integer:
        low, high = ends(dtype)

        def element(value: Any) -> int:
            if not isinstance(value, float):
                value = int(value)
                return _signed(value, dtype.bits) if low else _unsigned(value, dtype.bits)
            if math.isnan(value):
                return 0
            return high if value >= high else low if value <= low else math.trunc(value)

        plain = x.astype(np.float64) if source.is_float or source.is_complex else x
        values = [element(value if isinstance(value, float) else int(value)) for value in plain.ravel().tolist()]
        return np.array(values, np.int64 if low else np.uint64).astype(dtype.numpy).reshape(x.shape)
    with np.errstate(all="ignore"):
        if source.is_integer and source.bits == 4:
            x = x.astype(np.int8)
        return x.astype(np.float32).astype(dtype.numpy) if source.size < 4 else x.astype(dtype.numpy)


def _convert() -> list[Sample]:
    return [
        Sample(
            OpType.CONVERT_DTYPE,
            f"{source} to {target}",
            (edges(source),),
            lambda b, x, target=target: b.convert_dtype(x, target),
            host=lambda x, target=target: _converted(x, target),
            exact=True,
        )
        for source in DType
        for target in DType
    ]


def _width(dtype: DType) -> int:
    return 1 if dtype is DType.BOOL else dtype.bits


def _bits_of(x: np.ndarray, dtype: DType) -> np.ndarray:
    """By the bits as one Python integer, the first element lowest."""
    source = dtype_of(x.dtype)
    here, there = _width(source), _width(dtype)
    ratio = max(there // here, 1)
    raw = [int.from_bytes(value.tobytes(), "little") % 2**here for value in x.ravel()]
    groups = [raw[start : start + ratio] for start in range(0, len(raw), ratio)]
    words = [sum(value << here * place for place, value in enumerate(group)) for group in groups]
    parts = max(here // there, 1)
    values = [word >> there * part & 2**there - 1 for word in words for part in range(parts)]
    dims = (*x.shape, parts) if parts > 1 else x.shape[:-1] if ratio > 1 else x.shape
    if dtype.bits == 4:
        return np.array([_signed(v, 4) if dtype is DType.INT4 else v for v in values]).astype(dtype.numpy).reshape(dims)
    data = b"".join(value.to_bytes(dtype.size, "little") for value in values)
    return np.frombuffer(data, dtype.numpy).reshape(dims)


def _bitcast() -> list[Sample]:
    found = []
    for source in DType:
        for target in DType:
            last = max(_width(target) // _width(source), 1)
            found.append(
                Sample(
                    OpType.BITCAST,
                    f"{source} to {target}",
                    (normal(source, 3, last),),
                    lambda b, x, target=target: b.bitcast(x, target),
                    host=lambda x, target=target: _bits_of(x, target),
                    exact=True,
                )
            )
    empty = (*((DType.UINT8, to) for to in (DType.UINT32, DType.UINT4, DType.BOOL)), (DType.INT4, DType.BOOL))
    for source, target in (*empty, (DType.FLOAT32, DType.BOOL), (DType.BOOL, DType.INT32), (DType.BOOL, DType.UINT4)):
        last = max(_width(target) // _width(source), 1)
        found.append(
            Sample(
                OpType.BITCAST,
                f"nothing of {source} to {target}",
                (np.zeros((0, last), source.numpy),),
                lambda b, x, target=target: b.bitcast(x, target),
                host=lambda x, target=target: _bits_of(x, target),
                exact=True,
            )
        )
    return found


def _reduced(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    import jax

    with jax.enable_x64(True):
        found = jax.lax.reduce_precision(x, exponent_bits, mantissa_bits)
        return np.where(np.isnan(x), x, np.asarray(found)).astype(x.dtype)


def _reduce_precision() -> list[Sample]:
    found = []
    for dtype, sizes in (
        (DType.FLOAT16, ((5, 3), (3, 10), (8, 23))),
        (DType.BFLOAT16, ((4, 3), (8, 2), (8, 7))),
        (DType.FLOAT32, ((8, 7), (5, 10), (4, 3), (2, 0), (11, 52))),
        (DType.FLOAT64, ((8, 23), (5, 2), (11, 51))),
    ):
        x = np.concatenate([edges(dtype), normal(dtype, 40) * np.logspace(-6, 6, 40).astype(dtype.numpy)])
        for exponent, mantissa in sizes:
            # Of more bits than the type has: nothing is cut off.
            whole = dtype.size < 8 and (exponent, mantissa) in ((8, 23), (11, 52))
            found.append(
                Sample(
                    OpType.REDUCE_PRECISION,
                    f"{dtype} to {exponent} and {mantissa}",
                    (x.astype(dtype.numpy),),
                    lambda b, x, e=exponent, m=mantissa: b.reduce_precision(x, e, m),
                    host=lambda x, e=exponent, m=mantissa, whole=whole: x if whole else _reduced(x, e, m),
                    exact=True,
                )
            )
    return found


def _gelu(x: Any, approximate: bool) -> Any:
    import jax

    return jax.nn.gelu(x, approximate)


def _gelus() -> list[Sample]:
    return [
        Sample(
            OpType.GELU,
            f"{dtype}{' approximate' * approximate}",
            (edges(dtype)[:15],),
            lambda b, x, approximate=approximate: b.gelu(x, approximate),
            lambda x, approximate=approximate: _gelu(x, approximate),
            scaled=True,
        )
        for dtype in sorted(accepted_dtypes(OpType.GELU))
        for approximate in (False, True)
    ]


def samples() -> list[Sample]:
    """All of this file."""
    found = [sample for op_type in (*_UNARY, *_BINARY) for sample in _simple(op_type)]
    for dtype in INTEGERS:
        low, high = ends(dtype)
        given = (0, 1, dtype.bits - 1, dtype.bits, dtype.bits + 1, low or high)
        amounts = modular(np.array([min(amount, high) for amount in given], object), dtype)
        values = edges(dtype)
        x, by = np.repeat(values, len(amounts)), np.tile(amounts, len(values))
        found += [_sample(op_type, f"{dtype} by about its bits", x, by) for op_type in _SHIFTS]
    return [*found, *_clamp(), *_where(), *_convert(), *_bitcast(), *_gelus(), *_reduce_precision()]
