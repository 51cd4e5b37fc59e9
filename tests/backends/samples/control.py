"""Closures, sorting, random bits and collectives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from backend_samples.make import Sample, edges, normal

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import make_shape
from easytorch.backends.types import OpType, ReduceOpType

_STATE = np.array([0x0123456789ABCDEF, 2**64 - 1, 5], np.uint64)
# What XLA's RNG_PHILOX gives for seven words of that state (jaxlib 0.10.2, CPU).
_WORDS = (0xF02791C6, 0xEA2026EE, 0x4FE73934, 0xC174F57D, 0x15706CF1, 0x6AE9FC63, 0x7705DA3A)
_LONG = (
    *(0xEA2026EEF02791C6, 0xC174F57D4FE73934, 0x6AE9FC6315706CF1, 0xDE25ADEA7705DA3A, 0x8208C7C4912A9F2D),
    *(0x0CB3F6F6122772E4, 0x6C5F8DF449B1E8A7),
)


def _random(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    if dtype.bits == 64:
        return _STATE + np.array([0, 4, 1], np.uint64), np.array(_LONG, np.uint64).view(dtype.numpy)
    state = _STATE + np.array([0, 2, 1], np.uint64)
    low = np.array([word % 2**dtype.bits for word in _WORDS], np.uint64)
    if dtype.bits == 4:
        values = np.where((low > 7) & (dtype is DType.INT4), low.astype(np.int64) - 16, low.astype(np.int64))
        return state, values.astype(dtype.numpy)
    return state, low.astype(f"u{dtype.size}").view(dtype.numpy)


def _rng() -> list[Sample]:
    found = [
        Sample(
            OpType.RNG_BIT_GENERATOR,
            dtype,
            (_STATE,),
            lambda b, state, dtype=dtype: b.rng_bit_generator(state, make_shape(dtype, 7)),
            host=lambda state, dtype=dtype: _random(dtype),
            exact=True,
        )
        for dtype in DType
        if dtype is not DType.BOOL and not dtype.is_complex
    ]
    found.append(
        Sample(
            OpType.RNG_BIT_GENERATOR,
            "two axes",
            (_STATE,),
            lambda b, state: b.rng_bit_generator(state, make_shape(DType.UINT32, 2, 3)),
            host=lambda state: (_random(DType.UINT32)[0], np.array(_WORDS[:6], np.uint32).reshape(2, 3)),
            exact=True,
        )
    )
    return found


def _three_fry(shape: Any, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """As jax has it of XLA, in unsigned integers of the size."""
    import jax

    with jax.enable_x64(True):
        algorithm = jax.lax.RandomAlgorithm.RNG_THREE_FRY
        bits = np.dtype(f"u{dtype.size}")
        state, values = jax.lax.rng_bit_generator(_STATE[:2], shape, dtype=bits, algorithm=algorithm)
        return np.asarray(state), np.asarray(values).reshape(-1).view(dtype.numpy).reshape(shape)


def _three_fries() -> list[Sample]:
    shapes = ((), (1,), (7,), (2, 3), (3, 4), (3, 5), (5, 3, 3), (0, 3))
    cases = [(shape, DType.UINT32) for shape in shapes]
    cases += [((3, 5), dtype) for dtype in (DType.INT8, DType.UINT16, DType.BFLOAT16, DType.FLOAT32, DType.UINT64)]
    return [
        Sample(
            OpType.RNG_BIT_GENERATOR_THREE_FRY,
            f"{dtype}{list(shape)}",
            (_STATE[:2],),
            lambda b, state, s=shape, d=dtype: b.rng_bit_generator_three_fry(state, make_shape(d, s)),
            host=lambda state, s=shape, d=dtype: _three_fry(s, d),
            exact=True,
        )
        for shape, dtype in cases
    ]


def _sorts() -> list[Sample]:
    def less(b: Any, x: Any, y: Any, *rest: Any) -> Any:
        return b.less_than(x, y)

    def total(b: Any, x: Any, y: Any) -> Any:
        return b.less_than_total_order(x, y)

    def then(b: Any, x: Any, y: Any, v: Any, w: Any) -> Any:
        """By the first, equal ones by the second turned round."""
        return b.logical_or(b.less_than(x, y), b.logical_and(b.equal(x, y), b.greater_than(v, w)))

    def not_pointwise(b: Any, x: Any, y: Any) -> Any:
        both = b.concatenate(0, b.reshape(x, 1), b.reshape(y, 1))
        return b.less_than(b.reshape(b.slice(both, (0,), (1,))), y)

    found = []
    for dtype in (d for d in DType if not d.is_complex):
        values = np.array(normal(dtype, 3, 9))
        found.append(
            Sample(
                OpType.SORT,
                dtype,
                (values,),
                lambda b, x: b.sort(less, 1, True, x),
                host=lambda x: np.sort(x.astype(np.float64), 1).astype(x.dtype),
                exact=True,
            )
        )
    few = np.array([[3, 1, 2, 3, 1, 2, 3], [1, 1, 1, 0, 0, 0, 1]], np.int8)
    place = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7)).copy()
    for axis in (0, 1):
        x, y = (few, place) if axis else (few.T.copy(), place.T.copy())
        found.append(
            Sample(
                OpType.SORT,
                f"stable along {axis}",
                (x, y),
                lambda b, x, y, axis=axis: b.sort(less, axis, True, x, y),
                host=lambda x, y, axis=axis: (np.sort(x, axis), np.argsort(x, axis, kind="stable").astype(np.int32)),
                exact=True,
            )
        )
    found.append(
        Sample(
            OpType.SORT,
            "two keys",
            (few, place),
            lambda b, x, y: b.sort(then, 1, False, x, y),
            host=lambda x, y: tuple(
                np.take_along_axis(z, np.stack([np.lexsort((-b, a)) for a, b in zip(x, y, strict=True)]), 1)
                for z in (x, y)
            ),
            exact=True,
        )
    )
    found.append(
        Sample(
            OpType.SORT,
            "total order",
            (edges(DType.FLOAT32),),
            lambda b, x: b.sort(total, 0, True, x),
            host=lambda x: np.array(sorted(x.tolist(), key=lambda v: (v != v, v, np.copysign(1, v))), np.float32),
            exact=True,
        )
    )

    def from_captured(b: Any, x: Any, far: Any) -> Any:
        """The farthest from a captured number first."""
        return b.sort(lambda c, v, w: c.greater_than(c.abs(c.sub(v, far)), c.abs(c.sub(w, far))), 0, True, x)

    found.append(
        Sample(
            OpType.SORT,
            "captured",
            (normal(DType.FLOAT32, 11), np.array(0.25, np.float32)),
            from_captured,
            host=lambda x, far: x[np.argsort(-np.abs(x - far), kind="stable")],
            exact=True,
        )
    )
    found.append(
        Sample(
            OpType.SORT,
            "no pointwise comparator",
            (normal(DType.FLOAT32, 2, 5),),
            lambda b, x: b.sort(not_pointwise, 1, True, x),
            host=lambda x: np.sort(x, 1),
            exact=True,
        )
    )
    for comparator, dims in itertools.product((less, not_pointwise), ((0,), (1,), (0, 3), (3, 0))):
        found.append(
            Sample(
                OpType.SORT,
                f"{list(dims)} {comparator.__name__}",
                (normal(DType.FLOAT32, *dims),),
                lambda b, x, dims=dims, comparator=comparator: b.sort(comparator, len(dims) - 1, True, x),
                host=lambda x: x,
                exact=True,
            )
        )
    return found


def _one(b: Any, dtype: type = np.int32, value: int = 1) -> Any:
    return b.constant(np.array(value, dtype))


def _loop(b: Any, x: Any, limit: Any) -> Any:
    """Doubles x limit times; the outer x is captured by the body, the limit by the condition."""

    def body(c: Any, i: Any, y: Any) -> Any:
        return c.add(i, _one(c)), c.add(y, x)

    return b.while_loop(lambda c, i, y: c.less_than(i, limit), body, _one(b, value=0), x)


def _nested(b: Any, x: Any, limit: Any) -> Any:
    """A loop in a loop, in a branch, in a call: what is captured passes through all of them."""

    def inner(c: Any, count: Any) -> Any:
        return c.while_loop(
            lambda d, j, s: d.less_than(j, count),
            lambda d, j, s: (d.add(j, _one(d)), d.add(s, d.mul(x, d.convert_dtype(limit, "float32")))),
            _one(c, value=0),
            x,
        )[1]

    def outer(c: Any) -> Any:
        return c.while_loop(
            lambda d, i, s: d.less_than(i, limit),
            lambda d, i, s: (d.add(i, _one(d)), d.add(s, inner(d, i))),
            _one(c, value=0),
            x,
        )[1]

    def called(c: Any) -> Any:
        return c.cond(c.less_than(_one(c, value=0), limit), outer, lambda d: x)

    return b.call(called)


def _nested_host(x: np.ndarray, limit: np.ndarray) -> np.ndarray:
    total = x.copy()
    for i in range(int(limit)):
        total = total + x + x * i * float(limit)
    return total.astype(x.dtype) if limit > 0 else x


def _closures() -> list[Sample]:
    found = []
    x = np.array([0.5, -2.0, 8.0], np.float32)
    for count in (0, 1, 5):
        limit = np.array(count, np.int32)
        found.append(
            Sample(
                OpType.WHILE_LOOP,
                f"{count} times",
                (x, limit),
                _loop,
                host=lambda x, n: (n if n > 0 else np.array(0, np.int32), x * np.float32(n + 1)),
                exact=True,
            )
        )
        for op_type in (OpType.CALL, OpType.COND, OpType.WHILE_LOOP):
            found.append(Sample(op_type, f"nested, {count} times", (x, limit), _nested, host=_nested_host, exact=True))
    for holds in (False, True):
        pred = np.array(holds)
        found.append(
            Sample(
                OpType.COND,
                f"{holds} of the same captures",
                (pred, x, x[::-1].copy()),
                lambda b, p, v, w: b.cond(p, lambda c: (c.sub(v, w), v), lambda c: (c.sub(w, v), w)),
                host=lambda p, v, w: (v - w, v) if p else (w - v, w),
                exact=True,
            )
        )
        found.append(
            Sample(
                OpType.COND,
                f"{holds} of constants",
                (pred,),
                lambda b, p: b.cond(p, lambda c: _one(c), lambda c: _one(c, value=7)),
                host=lambda p: np.array(1 if p else 7, np.int32),
                exact=True,
            )
        )
    for dtype in DType:
        found.append(
            Sample(
                OpType.CALL,
                dtype,
                (normal(dtype, 2, 3), normal(dtype, 2, 3, seed=1)),
                lambda b, v, w: b.call(lambda c, y: (c.reshape(y, 6), w), v),
                host=lambda v, w: (v.reshape(6), w),
                exact=True,
            )
        )
    return found


def _collectives() -> list[Sample]:
    found = []
    groups: dict[str, tuple[int, Any]] = {
        "one device": (1, None),
        "two": (2, None),
        "groups": (4, [[0, 2], [3, 1]]),
        "apart": (2, [[0], [1]]),
        "of unequal sizes": (4, [[0, 3, 1], [2]]),
    }
    for name, (count, given) in groups.items():
        rows = given or [list(range(count))]
        for kind, function in (
            (ReduceOpType.SUM, np.add),
            (ReduceOpType.PRODUCT, np.multiply),
            (ReduceOpType.MAX, np.maximum),
            (ReduceOpType.MIN, np.minimum),
        ):
            found.append(
                _collective(
                    OpType.ALL_REDUCE,
                    f"{name} {kind}",
                    count,
                    rows,
                    lambda b, x, kind=kind, given=given: b.all_reduce(x, kind, given),
                    lambda xs, function=function: [function.reduce(xs)] * len(xs),
                )
            )
        if len({len(row) for row in rows}) > 1:
            continue
        found.append(
            _collective(
                OpType.ALL_GATHER,
                name,
                count,
                rows,
                lambda b, x, given=given: b.all_gather(x, 1, given),
                lambda xs: [np.concatenate(xs, 1)] * len(xs),
            )
        )
        found.append(
            _collective(
                OpType.REDUCE_SCATTER,
                name,
                count,
                rows,
                lambda b, x, given=given: b.reduce_scatter(x, ReduceOpType.SUM, 0, given),
                lambda xs: np.split(np.add.reduce(xs), len(xs), 0),
            )
        )
        found.append(
            _collective(
                OpType.ALL_TO_ALL,
                name,
                count,
                rows,
                lambda b, x, given=given: b.all_to_all(x, 0, 1, given),
                lambda xs: [
                    np.concatenate([np.split(x, len(xs), 0)[place] for x in xs], 1) for place in range(len(xs))
                ],
            )
        )
    for name, count, pairs in (("ring", 4, [[0, 1], [1, 2], [2, 3], [3, 0]]), ("one", 2, [[1, 0]]), ("none", 2, [])):
        found.append(
            _collective(
                OpType.COLLECTIVE_PERMUTE,
                name,
                count,
                [list(range(count))],
                lambda b, x, pairs=pairs: b.collective_permute(x, pairs),
                lambda xs, pairs=pairs: [
                    next((xs[source] for source, target in pairs if target == device), np.zeros_like(xs[0]))
                    for device in range(len(xs))
                ],
            )
        )
    return found


def _collective(op_type: OpType, name: str, count: int, groups: Any, build: Any, of_group: Any) -> Sample:
    inputs = tuple(normal(DType.FLOAT32, 4, 2, seed=seed) for seed in range(count))

    def host(*xs: np.ndarray) -> tuple[np.ndarray, ...]:
        results: dict[int, np.ndarray] = {}
        for group in groups:
            results.update(zip(group, of_group([xs[device] for device in group]), strict=True))
        return tuple(results[device] for device in range(count))

    return Sample(op_type, name, inputs, build, host=host, scaled=True, num_devices=count)


def samples() -> list[Sample]:
    """All of this file."""
    return [*_rng(), *_three_fries(), *_sorts(), *_closures(), *_collectives()]
