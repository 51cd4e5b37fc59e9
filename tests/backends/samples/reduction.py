"""Reductions, windows, and normalization over a batch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from backend_samples.make import FLOATS, INTEGERS, Sample, edges, ends, modular, normal

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.types import OpType, ReduceOpType

_JAX = {
    OpType.REDUCE_SUM: "sum",
    OpType.REDUCE_PRODUCT: "prod",
    OpType.REDUCE_MAX: "max",
    OpType.REDUCE_MIN: "min",
}
_HOST = {
    OpType.REDUCE_BITWISE_AND: (operator.and_, -1),
    OpType.REDUCE_BITWISE_OR: (operator.or_, 0),
    OpType.REDUCE_BITWISE_XOR: (operator.xor, 0),
    OpType.REDUCE_LOGICAL_AND: (operator.and_, -1),
    OpType.REDUCE_LOGICAL_OR: (operator.or_, 0),
    OpType.REDUCE_LOGICAL_XOR: (operator.xor, 0),
}


def _in_jax(op_type: OpType, axes: tuple[int, ...]) -> Callable[..., Any]:
    def in_jax(x: Any) -> Any:
        import jax.numpy as jnp

        kwargs = {"dtype": x.dtype} if _JAX[op_type] in ("sum", "prod") else {}
        return getattr(jnp, _JAX[op_type])(x, axis=axes or None, **kwargs)

    return in_jax


def _by_elements(op_type: OpType, axes: tuple[int, ...]) -> Callable[..., Any]:
    """Python's integers, one line after the other."""
    function, start = _HOST[op_type]

    def host(x: np.ndarray) -> np.ndarray:
        gone = axes or tuple(range(x.ndim))
        kept = [axis for axis in range(x.ndim) if axis not in gone]
        lines = x.transpose(*kept, *gone).reshape(
            *[x.shape[axis] for axis in kept], math.prod(x.shape[axis] for axis in gone)
        )
        found = [functools.reduce(function, map(int, lines[index]), start) for index in np.ndindex(*lines.shape[:-1])]
        dtype = dtype_of(x.dtype)
        values = np.array([value % 2 for value in found] if dtype is DType.BOOL else found, object)
        return (values.astype(bool) if dtype is DType.BOOL else modular(values, dtype)).reshape(lines.shape[:-1])

    return host


def _reduce(op_type: OpType, dtype: DType, name: str, x: np.ndarray, *axes: int) -> Sample:
    in_jax = _in_jax(op_type, axes) if op_type in _JAX else None
    host = _by_elements(op_type, axes) if op_type in _HOST else None
    extreme = op_type in (OpType.REDUCE_MAX, OpType.REDUCE_MIN)
    return Sample(
        op_type,
        f"{dtype} {name}",
        (x,),
        lambda b, x: getattr(b, op_type.method)(x, *axes),
        in_jax,
        host,
        exact=extreme or not (dtype.is_float or dtype.is_complex),
        scaled=True,
    )


def _reductions() -> list[Sample]:
    found = []
    for op_type in (*_JAX, *_HOST):
        for dtype in sorted(accepted_dtypes(op_type)):
            found.append(_reduce(op_type, dtype, "middle axis", normal(dtype, 2, 3, 4), 1))
            if not (dtype.is_complex and op_type is OpType.REDUCE_PRODUCT):
                found.append(_reduce(op_type, dtype, "all by none", normal(dtype, 3, 2)))
        dtype = DType.FLOAT32 if DType.FLOAT32 in accepted_dtypes(op_type) else sorted(accepted_dtypes(op_type))[0]
        found.append(_reduce(op_type, dtype, "two axes, turned round", normal(dtype, 2, 3, 4), 2, 0))
        found.append(_reduce(op_type, dtype, "scalar", normal(dtype)))
        if op_type not in (OpType.REDUCE_MAX, OpType.REDUCE_MIN):
            found.append(_reduce(op_type, dtype, "empty axis", normal(dtype, 2, 0), 1))
        found.append(_reduce(op_type, dtype, "empty result", normal(dtype, 0, 2), 1))
    # A long sum of small numbers is lost in sixteen bits: it is made in float32.
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        found.append(_reduce(OpType.REDUCE_SUM, dtype, "long", np.full((4000,), 0.01, dtype.numpy)))
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        for op_type in (OpType.REDUCE_MAX, OpType.REDUCE_MIN):
            found.append(_reduce(op_type, dtype, "with NaN", edges(dtype)[2:].reshape(4, 4), 1))
    # Of no elements: what no element of the type is below, or above.
    for dtype, both in {
        DType.FLOAT32: (-np.inf, np.inf),
        DType.FLOAT8_E4M3FN: (-448, 448),
        DType.INT4: (-8, 7),
        DType.UINT8: (0, 255),
        DType.BOOL: (False, True),
    }.items():
        for op_type, end in zip((OpType.REDUCE_MAX, OpType.REDUCE_MIN), both, strict=True):
            wanted = np.full((2,), end).astype(dtype.numpy)
            found.append(
                Sample(
                    op_type,
                    f"{dtype} of nothing",
                    (normal(dtype, 2, 0),),
                    lambda b, x, op_type=op_type: getattr(b, op_type.method)(x, 1),
                    host=lambda x, wanted=wanted: wanted,
                    exact=True,
                )
            )
    return found


def _first_extreme(x: np.ndarray, axis: int, is_min: bool, dtype: DType) -> np.ndarray:
    def best(line: np.ndarray) -> int:
        values = [float(value) if x.dtype.kind not in "iu" else int(value) for value in line]
        for place, value in enumerate(values):
            if value != value:
                return place
        return values.index(min(values) if is_min else max(values))

    return np.apply_along_axis(lambda line: best(line), axis, x).astype(dtype.numpy)


def _arg_min_max() -> list[Sample]:
    def sample(name: str, x: np.ndarray, axis: int, is_min: bool, dtype: DType = DType.INT32) -> Sample:
        return Sample(
            OpType.ARG_MIN_MAX,
            f"{name} along {axis}, {'least' if is_min else 'greatest'}, {dtype}",
            (x,),
            lambda b, x: b.arg_min_max(x, axis, dtype, is_min),
            host=lambda x: _first_extreme(x.astype(np.float64), axis, is_min, dtype),
            exact=True,
        )

    found = []
    for is_min in (False, True):
        for dtype in sorted(accepted_dtypes(OpType.ARG_MIN_MAX)):
            found.append(sample(dtype, normal(dtype, 4, 5), 1, is_min))
        found.append(sample("several", np.array([[3, 1, 3, 1], [2, 2, 2, 2]], np.float32), 1, is_min))
        nan = np.array([[1, np.nan, 0, np.nan], [np.nan, 1, 2, 3], [5, 6, 7, np.nan]], np.float32)
        found.append(sample("NaN", nan, 1, is_min))
        found.append(sample("NaN", nan, 0, is_min, DType.UINT8))
        found.append(sample("zeros of both signs", np.array([0.0, -0.0, 0.0], np.float32), 0, is_min, DType.INT64))
        found.append(sample("infinite", np.array([np.inf, -np.inf, np.inf], np.float32), 0, is_min))
    return found


_WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((5, 6), {"window_dimensions": (2, 3)}),
    "strides": ((5, 6), {"window_dimensions": (2, 3), "strides": (1, 2)}),
    "padded": ((5, 6), {"window_dimensions": (3, 2), "strides": (2, 1), "paddings": ((1, 2), (0, 1))}),
    "base dilated": ((3, 4), {"window_dimensions": (2, 2), "strides": (1, 1), "base_dilations": (2, 3)}),
    "window dilated": ((7, 8), {"window_dimensions": (2, 3), "strides": (1, 2), "window_dilations": (3, 2)}),
    "all": (
        (4, 5),
        {
            "window_dimensions": (2, 2),
            "strides": (2, 1),
            "base_dilations": (2, 1),
            "window_dilations": (2, 3),
            "paddings": ((1, 1), (2, 0)),
        },
    ),
    "dilated alike": (
        (4, 5),
        {
            "window_dimensions": (3, 2),
            "strides": (1, 1),
            "base_dilations": (2, 4),
            "window_dilations": (2, 6),
            "paddings": ((2, 1), (0, 3)),
        },
    ),
    "cropped": ((6, 7), {"window_dimensions": (2, 2), "strides": (1, 1), "paddings": ((-1, 0), (1, -2))}),
    "larger than the array": ((2, 3), {"window_dimensions": (3, 2), "strides": (1, 1)}),
    "empty": ((0, 3), {"window_dimensions": (1, 2), "strides": (1, 1)}),
    "only padding": ((1,), {"window_dimensions": (2,), "strides": (2,), "paddings": ((4, 1),)}),
}
_TWO = {
    ReduceOpType.SUM: (np.add, 0),
    ReduceOpType.PRODUCT: (np.multiply, 1),
    ReduceOpType.MAX: (np.maximum, None),
    ReduceOpType.MIN: (np.minimum, None),
}


def _windowed(x: np.ndarray, kind: ReduceOpType, setting: dict[str, Any]) -> np.ndarray:
    """Window by window, as https://openxla.org/stablehlo/spec#reduce_window, in a wider type."""
    dtype = dtype_of(x.dtype)
    wide = x.astype(np.float64 if dtype.is_float else np.complex128 if dtype.is_complex else object)
    rank = x.ndim
    window = setting["window_dimensions"]
    strides = setting.get("strides", window)
    base = setting.get("base_dilations", (1,) * rank)
    dilations = setting.get("window_dilations", (1,) * rank)
    pads = setting.get("paddings", ((0, 0),) * rank)
    sizes = []
    for axis in range(rank):
        full = ((x.shape[axis] - 1) * base[axis] + 1 if x.shape[axis] else 0) + sum(pads[axis])
        span = (window[axis] - 1) * dilations[axis] + 1
        sizes.append((full - span) // strides[axis] + 1 if full >= span else 0)
    function, start = _TWO[kind]
    if start is None:
        start = _end(dtype, kind)
    result = np.full(sizes, start, wide.dtype)
    for place in np.ndindex(*sizes):
        for offset in np.ndindex(*window):
            index = []
            for axis in range(rank):
                at = place[axis] * strides[axis] + offset[axis] * dilations[axis] - pads[axis][0]
                index.append(at // base[axis] if at % base[axis] == 0 else -1)
            if all(0 <= i < n for i, n in zip(index, x.shape, strict=True)):
                result[place] = function(result[place], wide[tuple(index)])
    if dtype.is_integer:
        return modular(result, dtype)
    return result.astype(dtype.numpy)


def _end(dtype: DType, kind: ReduceOpType) -> Any:
    greatest = kind is ReduceOpType.MIN
    if dtype is DType.BOOL:
        return greatest
    if dtype.is_integer:
        return ends(dtype)[greatest]
    finite = {DType.FLOAT8_E4M3FN: 448, DType.FLOAT8_E4M3FNUZ: 240, DType.FLOAT8_E5M2FNUZ: 57344}
    return finite.get(dtype, np.inf) * (1 if greatest else -1)


def _reduce_window() -> list[Sample]:
    found = []
    for (name, (dims, setting)), kind in itertools.product(_WINDOWS.items(), _TWO):
        every = sorted(accepted_dtypes(OpType.REDUCE_WINDOW)) if name == "all" else (DType.FLOAT32, DType.INT8)
        for dtype in every:
            ordered = kind in (ReduceOpType.MAX, ReduceOpType.MIN)
            if dtype.is_complex if ordered else dtype is DType.BOOL:
                continue
            found.append(
                Sample(
                    OpType.REDUCE_WINDOW,
                    f"{name} {kind} {dtype}",
                    (normal(dtype, *dims),),
                    lambda b, x, kind=kind, setting=setting: b.reduce_window(x, kind, **setting),
                    host=lambda x, kind=kind, setting=setting: _windowed(x, kind, setting),
                    exact=ordered or dtype.is_integer,
                    scaled=True,
                )
            )
    return found


def _scattered(
    operand: np.ndarray, source: np.ndarray, op_type: OpType, window: Any, strides: Any, pads: Any
) -> np.ndarray:
    """Window by window: the first of the greatest (least) elements inside the operand, or all of them."""
    dtype = dtype_of(operand.dtype)
    wide = np.float64 if dtype.is_float else object
    result = np.zeros(operand.shape, wide)
    for place in np.ndindex(*source.shape):
        inside = []
        for offset in np.ndindex(*window):
            index = tuple(p * s + o - pad[0] for p, s, o, pad in zip(place, strides, offset, pads, strict=True))
            if all(0 <= i < n for i, n in zip(index, operand.shape, strict=True)):
                inside.append(index)
        if op_type is not OpType.SELECT_AND_SCATTER_SUM and inside:
            choose = max if op_type is OpType.SELECT_AND_SCATTER_MAX else min
            inside = [choose(inside, key=lambda index: float(operand[index]))]
        for index in inside:
            result[index] += source[place].item() if wide is object else source[place].astype(wide)
    if dtype.is_integer:
        return modular(result, dtype)
    return result.astype(dtype.numpy)


def _select_and_scatter() -> list[Sample]:
    settings = {
        "plain": ((4, 6), (2, 3), None, None, (2, 2)),
        "overlapping": ((5, 5), (3, 2), (1, 1), None, (3, 4)),
        "padded": ((4, 5), (2, 3), (2, 2), ((1, 1), (0, 2)), (3, 3)),
        "gaps": ((7,), (2,), (3,), None, (2,)),
    }
    found = []
    for op_type in (OpType.SELECT_AND_SCATTER_MAX, OpType.SELECT_AND_SCATTER_MIN, OpType.SELECT_AND_SCATTER_SUM):
        for name, (dims, window, strides, pads, places) in settings.items():
            for dtype in (*INTEGERS, *FLOATS) if name == "padded" else (DType.FLOAT32, DType.INT8):
                arguments = (op_type, window, strides or window, pads or ((0, 0),) * len(window))
                found.append(
                    Sample(
                        op_type,
                        f"{name} {dtype}",
                        (normal(dtype, *dims), normal(dtype, *places, seed=1)),
                        lambda b, x, y, op=op_type, w=window, s=strides, p=pads: getattr(b, op.method)(x, y, w, s, p),
                        host=lambda x, y, arguments=arguments: _scattered(x, y, *arguments),
                        exact=dtype.is_integer,
                        scaled=True,
                    )
                )
    return found


def _by_any() -> list[Sample]:
    """By closures: those of the named operations, and products at the nearest to zero."""
    found = []
    window, strides, pads = (2, 3), (2, 2), ((1, 1), (0, 2))
    for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.INT32, DType.UINT8, DType.FLOAT64):
        found.append(
            Sample(
                OpType.SELECT_AND_SCATTER,
                f"{dtype}",
                (normal(dtype, 4, 5), normal(dtype, 3, 3, seed=1), np.array(0).astype(dtype.numpy)),
                lambda b, x, y, init: b.select_and_scatter(
                    x,
                    y,
                    init,
                    lambda c, p, q: c.less_or_equal(p, q),
                    lambda c, p, q: c.add(p, q),
                    window,
                    strides,
                    pads,
                ),
                host=lambda x, y, init: _scattered(x, y, OpType.SELECT_AND_SCATTER_MIN, window, strides, pads),
                exact=dtype.is_integer,
                scaled=True,
            )
        )
    x = np.array([[3, -1, 2, 5], [0.5, 4, -6, 7]], np.float32)
    source = np.array([[2], [3]], np.float32)
    found.append(
        Sample(
            OpType.SELECT_AND_SCATTER,
            "products at the nearest to zero",
            (x, source, np.float32(10).reshape(())),
            lambda b, x, y, init: b.select_and_scatter(
                x, y, init, lambda c, p, q: c.less_than(c.abs(p), c.abs(q)), lambda c, p, q: c.mul(p, q), (1, 4)
            ),
            host=lambda x, y, init: np.array([[10, 20, 10, 10], [30, 10, 10, 10]], np.float32),
        )
    )
    scalar = np.float32(2).reshape(())
    found.append(
        Sample(
            OpType.SELECT_AND_SCATTER,
            "scalar",
            (scalar, scalar, scalar),
            lambda b, x, y, init: b.select_and_scatter(
                x, y, init, lambda c, p, q: c.less_than(p, q), lambda c, p, q: c.add(c.add(p, q), q), ()
            ),
            host=lambda x, y, init: np.float32(6).reshape(()),
        )
    )
    return found


def _folded(operand: np.ndarray, source: np.ndarray, better: Any, window: Any, strides: Any, pads: Any) -> np.ndarray:
    """Sums at the element of each window that is left where the next one is taken unless better(left, next)."""
    result = np.zeros(operand.shape, operand.dtype)
    for place in np.ndindex(*source.shape):
        left: Any = None
        for offset in np.ndindex(*window):
            index = tuple(p * s + o - pad[0] for p, s, o, pad in zip(place, strides, offset, pads, strict=True))
            if all(0 <= i < n for i, n in zip(index, operand.shape, strict=True)) and not (
                left is not None and better(operand[left], operand[index])
            ):
                left = index
        if left is not None:
            result[left] += source[place]
    return result


def _sum_of_two(c: Any, p: Any, q: Any) -> Any:
    return c.add(p, q)


def _among_equals() -> list[Sample]:
    """By closures that are false of equals, or no order at all: which of several is taken."""
    window, strides, pads = (2, 3), (1, 2), ((1, 1), (0, 3))
    rng = np.random.default_rng(5)
    found = []
    for name in ("greater_than", "less_than", "greater_or_equal", "not_equal", "equal"):
        for dtype in (DType.FLOAT32, DType.INT8):
            operand = rng.integers(0, 3, (5, 6)).astype(dtype.numpy)
            source = rng.integers(1, 4, (6, 4)).astype(dtype.numpy)
            better = getattr(np, {"greater_or_equal": "greater_equal"}.get(name, name.removesuffix("_than")))

            def by(b: Any, x: Any, y: Any, init: Any, name: str = name) -> Any:
                settings = (window, strides, pads)
                return b.select_and_scatter(x, y, init, lambda c, p, q: getattr(c, name)(p, q), _sum_of_two, *settings)

            found.append(
                Sample(
                    OpType.SELECT_AND_SCATTER,
                    f"among equals {name} {dtype}",
                    (operand, source, np.array(0).astype(dtype.numpy)),
                    by,
                    host=lambda x, y, init, better=better: _folded(x, y, better, window, strides, pads),
                    exact=True,
                )
            )
    return found + _first_of_equals()


def _first_of_equals() -> list[Sample]:
    """Windows in three dimensions that begin and end in the padding, of few different numbers."""
    dims, window, strides, pads, places = (5, 5, 3), (4, 5, 2), (1, 2, 2), ((0, 3), (4, 0), (1, 0)), (5, 3, 2)
    rng = np.random.default_rng(6)
    found = []
    for op_type in (OpType.SELECT_AND_SCATTER_MAX, OpType.SELECT_AND_SCATTER_MIN):
        for dtype in (DType.UINT8, DType.FLOAT16):
            found.append(
                Sample(
                    op_type,
                    f"the first of equals {dtype}",
                    tuple(rng.integers(0, 3, size).astype(dtype.numpy) for size in (dims, places)),
                    lambda b, x, y, op=op_type: getattr(b, op.method)(x, y, window, strides, pads),
                    host=lambda x, y, op=op_type: _scattered(x, y, op, window, strides, pads),
                    exact=True,
                )
            )
    return found


_EPSILON = 0.125


def _normed(x: Any, scale: Any, offset: Any, epsilon: float, axis: int) -> Any:
    import jax.numpy as jnp

    others = tuple(other for other in range(x.ndim) if other != axis)
    mean, variance = jnp.mean(x, others), jnp.var(x, others)
    return _with(x, scale, offset, mean, variance, epsilon, axis), mean, variance


def _with(x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, axis: int) -> Any:
    def along(vector: Any) -> Any:
        return vector.reshape([-1 if other == axis else 1 for other in range(x.ndim)])

    return (x - along(mean)) / (along(variance) + epsilon) ** 0.5 * along(scale) + along(offset)


def _gradient(x: Any, scale: Any, mean: Any, variance: Any, grad: Any, epsilon: float, axis: int) -> Any:
    """By jax's differentiation of the forward pass, whose own mean and variance these are."""
    return _jitted_gradient(epsilon, axis)(x, scale, grad)


@functools.cache
def _jitted_gradient(epsilon: float, axis: int) -> Callable[..., Any]:
    import jax

    return jax.jit(lambda x, scale, grad: jax.vjp(lambda *i: _normed(*i, epsilon, axis)[0], x, scale, scale)[1](grad))


def _batch_norms() -> list[Sample]:
    found = []
    for dtype, (dims, axis) in itertools.product(FLOATS, (((3, 4, 2), 1), ((5, 3), 0), ((2, 3), 1))):
        x, grad = normal(dtype, *dims), normal(dtype, *dims, seed=5)
        scale, offset, mean = (normal(dtype, dims[axis], seed=seed) for seed in (1, 2, 3))
        spread = np.abs(normal(dtype, dims[axis], seed=4).astype(np.float32)).astype(dtype.numpy)
        name = f"{dtype}{list(dims)} along {axis}"
        found.append(
            Sample(
                OpType.BATCH_NORM_FOR_INFERENCE,
                name,
                (x, scale, offset, mean, spread),
                lambda b, *ops, axis=axis: b.batch_norm_for_inference(*ops, _EPSILON, axis),
                lambda *arrays, axis=axis: _with(*arrays, _EPSILON, axis),
                scaled=True,
            )
        )
        found.append(
            Sample(
                OpType.BATCH_NORM_FOR_TRAINING,
                name,
                (x, scale, offset),
                lambda b, *ops, axis=axis: b.batch_norm_for_training(*ops, _EPSILON, axis),
                lambda *arrays, axis=axis: _normed(*arrays, _EPSILON, axis),
                scaled=True,
            )
        )
        if dtype not in (DType.FLOAT32, DType.FLOAT64):
            continue
        others = tuple(other for other in range(len(dims)) if other != axis)
        found.append(
            Sample(
                OpType.BATCH_NORM_GRADIENT,
                name,
                (x, scale, x.mean(others), x.var(others), grad),
                lambda b, *ops, axis=axis: b.batch_norm_gradient(*ops, _EPSILON, axis),
                lambda *arrays, axis=axis: _gradient(*arrays, _EPSILON, axis),
                scaled=True,
            )
        )
    return found


def samples() -> list[Sample]:
    """All of this file."""
    return [
        *_reductions(),
        *_arg_min_max(),
        *_reduce_window(),
        *_select_and_scatter(),
        *_among_equals(),
        *_by_any(),
        *_batch_norms(),
    ]
