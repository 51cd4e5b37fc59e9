"""Random computations: every backend gives what NumPy gives, bit by bit.

Values are small integers in every type, and stay so: whatever grows is clamped. Then sums have no rounding, comparisons
no near ties, and a difference is an error and not noise. Rounding is what the samples of test_conformance.py are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from easytorch import backends
from easytorch.backends import Builder, Op, PadAxis, ReduceOpType, make_shape

BOUND = 50
MOST = 100
INPUTS = {
    "f": np.array([[1, -2, 0], [3, 3, -50]], np.float32),
    "h": np.array([[2, -1, 7], [0, -4, 5]]).astype(make_shape("bfloat16").dtype.numpy),
    "i": np.array([[7, -7, 0], [2, -1, 50]], np.int32),
    "n": np.array([[7, 3, 0], [2, 1, 50]], np.uint8),
    "p": np.array([[True, False, True], [False, False, True]]),
}


def bounded(b: Builder, x: Op) -> Op:
    dtype = x.shape.dtype
    if dtype == "bool":
        return x
    low = 0 if dtype.value.startswith("uint") else -BOUND
    low, high = (b.constant(np.array(value).astype(dtype.numpy)) for value in (low, BOUND))
    return b.clamp(low, x, high)


def zero(b: Builder, x: Op, value: int = 0) -> Op:
    return b.constant(np.array(value).astype(x.shape.dtype.numpy))


def unary(b: Builder, x: Op, y: Op, k: int) -> Op:
    dtype = x.shape.dtype
    if dtype == "bool":
        return b.logical_not(x)
    if dtype == "uint8":
        return (b.bitwise_not, b.bit_count, b.clz)[k % 3](x)
    return (b.neg, b.abs, b.sign)[k % 3](x)


def binary(b: Builder, x: Op, y: Op, k: int) -> Op:
    dtype = x.shape.dtype
    if dtype == "bool":
        return (b.logical_and, b.logical_or, b.logical_xor, b.max, b.min)[k % 5](x, y)
    table = [b.add, b.sub, b.mul, b.max, b.min]
    if dtype.is_integer:
        table += [b.div, b.rem, b.bitwise_and, b.bitwise_xor, b.shift_right_arithmetic]
    return table[k % len(table)](x, y)


def compare(b: Builder, x: Op, y: Op, k: int) -> Op:
    return (b.equal, b.not_equal, b.less_than, b.greater_or_equal)[k % 4](x, y)


def choose(b: Builder, x: Op, y: Op, k: int) -> Op:
    return b.where(compare(b, x, y, k), x, y)


def convert(b: Builder, x: Op, y: Op, k: int) -> Op:
    return b.convert_dtype(x, ("float32", "int32", "bfloat16", "uint8", "bool", "int64", "float16")[k % 7])


def move(b: Builder, x: Op, y: Op, k: int) -> Op:
    rank = x.shape.rank
    if not rank:
        return b.broadcast(x, 2, 3)
    axis = k % rank
    growing = x.shape.size > MOST
    choices: list[Callable[[], Op]] = [
        lambda: b.transpose(x, *reversed(range(rank))),
        lambda: b.reverse(x, axis),
        lambda: b.reshape(x, x.shape.size),
        lambda: b.slice(x, (0,) * rank, x.shape.dimensions, (2,) * rank),
        lambda: x if growing else b.concatenate(axis, x, y),
        lambda: x if growing else b.pad(x, zero(b, x, 1), PadAxis(1, -1, 1)) if x.shape.dimensions[0] else x,
        lambda: x if growing or rank > 3 else b.broadcast(x, 2),
    ]
    return choices[(k // 4) % len(choices)]()


def reduce(b: Builder, x: Op, y: Op, k: int) -> Op:
    rank = x.shape.rank
    axes = (k % rank,) if rank and k % 2 else ()
    if x.shape.dtype == "bool":
        return (b.reduce_logical_and, b.reduce_logical_or, b.reduce_logical_xor)[k % 3](x, *axes)
    if k % 5 == 4 and rank and x.shape.dimensions[k % rank]:
        return b.arg_min_max(x, k % rank, "int32", bool(k % 2))
    table = [b.reduce_max, b.reduce_min]
    if x.shape.dtype in ("float32", "int32"):
        table.append(b.reduce_sum)
    return table[k % len(table)](x, *axes)


def window(b: Builder, x: Op, y: Op, k: int) -> Op:
    rank = x.shape.rank
    kind = ReduceOpType.MAX if k % 2 or x.shape.dtype not in ("float32", "int32") else ReduceOpType.SUM
    pads = ((k % 3, 1),) * rank
    return b.reduce_window(x, kind, (2,) * rank, (1 + k % 2,) * rank, None, (1 + k % 3,) * rank, pads)


def product(b: Builder, x: Op, y: Op, k: int) -> Op:
    if x.shape.rank != 2 or x.shape.dtype not in ("float32", "int32"):
        return x
    return b.dot_general(x, (1,), (), y, (1,), ()) if k % 2 else b.dot_general(x, (1,), (0,), y, (1,), (0,))


def index(b: Builder, x: Op, y: Op, k: int) -> Op:
    if not x.shape.rank or 0 in x.shape.dimensions:
        return x
    rows = b.constant(np.array([k % 5 - 1, 0, k % 2], np.int32))
    rest = tuple(range(1, x.shape.rank))
    sizes = (1, *x.shape.dimensions[1:])
    picked = b.gather(x, rows, 1, rest, (0,), (0,), sizes)
    if k % 3 == 0:
        return picked
    if k % 3 == 1 or x.shape.dtype == "bool":
        return b.scatter_max(x, rows, picked, 1, rest, (0,), (0,))
    return b.scatter_sum(x, rows, picked, 1, rest, (0,), (0,))


def closure(b: Builder, x: Op, y: Op, k: int) -> Op:
    if k % 3 == 0:
        return b.call(lambda c, z: bounded(c, binary(c, z, y, k // 3)), x)[0]
    if k % 3 == 1:
        first = b.reshape(compare(b, x, y, k // 3), x.shape.size)
        pred = b.reduce_logical_and(first, 0)
        return b.cond(pred, lambda c: binary(c, x, y, k // 3), lambda c: unary(c, x, y, k // 3))[0]
    times = b.constant(np.int32(k % 4))

    def body(c: Builder, count: Op, z: Op) -> tuple[Op, Op]:
        return c.add(count, c.constant(np.int32(1))), bounded(c, binary(c, z, y, k // 3))

    return b.while_loop(lambda c, count, z: c.less_than(count, times), body, b.constant(np.int32(0)), x)[1]


def order(b: Builder, x: Op, y: Op, k: int) -> Op:
    if not x.shape.rank:
        return x
    return b.sort(lambda c, p, q, r, s: c.less_than(p, q), k % x.shape.rank, True, x, y)[k % 2]


STEPS = (unary, binary, compare, choose, convert, move, reduce, window, product, index, closure, order)
NUMBERS = st.integers(0, 60)
RECIPES = st.lists(st.tuples(st.sampled_from(STEPS), NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=10)


def build(b: Builder, recipe: list[Any]) -> list[Op]:
    """Each step takes an operation by the first number, one of its shape by the second, settings by the third."""
    pool = [b.parameter(name, make_shape(array.dtype, array.shape)) for name, array in INPUTS.items()]
    for step, one, other, setting in recipe:
        x = pool[-1 - one % len(pool)]
        like = [op for op in pool if op.shape == x.shape]
        pool.append(bounded(b, step(b, x, like[other % len(like)], setting)))
    return pool[len(INPUTS) :]


def run(backend: backends.Backend, recipe: list[Any]) -> list[np.ndarray]:
    b = backend.builder("random")
    executable = b.compile(*build(b, recipe))
    found = executable.execute([backend.buffer_from_numpy(array) for array in INPUTS.values()])
    return [backend.buffer_to_numpy(buffer) for buffer in found]


@pytest.mark.parametrize("config", ["torch", "xla"])
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(recipe=RECIPES)
def test_a_random_computation(config: str, recipe: list[Any], backend_of: Callable[[str], backends.Backend]) -> None:
    for found, wanted in zip(run(backend_of(config), recipe), run(backend_of("numpy"), recipe), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))
