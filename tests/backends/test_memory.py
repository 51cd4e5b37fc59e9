"""What an operation of the reference allocates: in proportion to its operands and its result, whatever its settings."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import ConvolveAxesConfig, OpType, PadAxis, ReduceOpType, make_shape
from easytorch.backends.dtypes import DType
from easytorch.backends.reference.ops.reduction import BLOCK
from easytorch.backends.shapeinference import accepted_dtypes

# Bytes for each element of operands and result (places and masks are words of their own), and for blocks of work.
A_ELEMENT, BLOCKS = 160, 48 << 20
SUM, MAX = ReduceOpType.SUM, ReduceOpType.MAX
_LINE = ConvolveAxesConfig(0, 1, (2,), 1, 0, (2,), 0, 1, (2,))
_PLANE = ConvolveAxesConfig(0, 1, (2, 3), 1, 0, (2, 3), 0, 1, (2, 3))
FAR = 2**30
# Sizes of the float32 operands, and the operation: by a definition that writes out padding, windows or scores, each
# would take gigabytes.
AWKWARD: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "padding that is cropped": ([(4,), ()], lambda b, x, f: b.pad(x, f, PadAxis(FAR, 2 - FAR))),
    "far apart": ([(2,), ()], lambda b, x, f: b.pad(x, f, PadAxis(0, 3 - FAR, FAR))),
    "far windows": ([(4,)], lambda b, x: b.reduce_window(x, SUM, (2,), (FAR,), paddings=[(FAR, FAR)])),
    "long windows": ([(9,)], lambda b, x: b.reduce_window(x, MAX, (FAR,), (FAR,), paddings=[(FAR, FAR)])),
    "dilated elements": ([(9,)], lambda b, x: b.reduce_window(x, SUM, (FAR,), (FAR,), (FAR // 3,))),
    "dilated windows": ([(9,)], lambda b, x: b.reduce_window(x, SUM, (3,), (FAR,), None, (FAR,), [(FAR, FAR)])),
    "large windows": ([(600, 600)], lambda b, x: b.reduce_window(x, SUM, (300, 300), (1, 1))),
    "a running sum": ([(20_000,)], lambda b, x: b.reduce_window(x, SUM, (20_000,), (1,), paddings=[(19_999, 0)])),
    "one axis grows, one shrinks": (
        [(1, 3000)],
        lambda b, x: b.reduce_window(x, SUM, (3000, 3000), (1, 1), paddings=[(2999, 0), (0, 0)]),
    ),
    "a large filter": ([(1, 8, 60, 60), (1, 8, 31, 31)], lambda b, x, k: b.conv_general_dilated(x, k, _PLANE)),
    "a padded convolution": (
        [(1, 1, 4), (1, 1, 2)],
        lambda b, x, k: b.conv_general_dilated(x, k, _LINE, (FAR,), [(FAR, FAR)]),
    ),
    "a dilated convolution": (
        [(1, 1, 4), (1, 1, 2)],
        lambda b, x, k: b.conv_general_dilated(x, k, _LINE, (FAR,), [(0, 0)], (FAR,), (FAR // 2,)),
    ),
    "attention to many": (
        [(1, 2, 5000, 1), (1, 1, 5000, 1), (1, 1, 5000, 1)],
        lambda b, *x: b.scaled_dot_product_attention(*x, is_causal=True),
    ),
    "sums of products": ([(3, 700), (3, 700)], lambda b, x, y: b.dot_general(x, (1,), (0,), y, (1,), (0,))),
    "a sort": ([(3, 20_000)], lambda b, x: b.sort(lambda c, p, q: c.less_than(p, q), 1, True, x)[0]),
    "selected": (
        [(300, 300), (30, 30)],
        lambda b, x, y: b.select_and_scatter_max(x, y, (10, 10)),
    ),
    "random bytes": (
        [()],
        lambda b, x: b.rng_bit_generator(b.constant(np.ones(3, "u8")), make_shape("uint8", FAR >> 9))[1],
    ),
}


def extra(build: Callable[..., Any], *arrays: np.ndarray) -> tuple[int, int]:
    """The most bytes that were allocated while it ran, and the elements of operands and result."""
    backend = backends.new("numpy")
    b = backend.builder("memory")
    ops = [b.parameter(f"x{n}", make_shape(array.dtype, array.shape)) for n, array in enumerate(arrays)]
    program = b.compile(build(b, *ops))
    buffers = [backend.buffer_from_numpy(array) for array in arrays]
    tracemalloc.start()
    try:
        program.execute(buffers)
        return tracemalloc.get_traced_memory()[1], sum(a.size for a in arrays) + program.outputs()[0].size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_settings(name: str) -> None:
    shapes, build = AWKWARD[name]
    peak, elements = extra(build, *(np.ones(shape, np.float32) for shape in shapes))
    assert peak <= A_ELEMENT * elements + BLOCKS, f"{peak >> 20} MiB for {elements} elements"


@pytest.mark.parametrize(
    "op_type", [op for op in OpType if op.name in ("ERF", "POW", "CLZ", "REM", "LOG1P", "ROUND")], ids=str
)
def test_elements(op_type: OpType) -> None:
    count = 1 << 20
    for dtype in (DType.UINT8, DType.FLOAT8_E5M2, DType.COMPLEX64):
        if dtype in accepted_dtypes(op_type):
            unary = op_type.name in ("ERF", "CLZ", "LOG1P", "ROUND")
            arrays = [np.ones(count, dtype.numpy)] * (1 if unary else 2)
            peak, elements = extra(lambda b, *x: getattr(b, op_type.method)(*x), *arrays)
            assert peak <= A_ELEMENT * elements, f"{dtype}: {peak >> 20} MiB for {elements} elements"


@pytest.mark.parametrize("masked", [False, True])
def test_attention_block_by_block(masked: bool) -> None:
    """Equal scores: each query gets the mean of the values up to its own, in the last block as in the first."""
    count = 1500
    backend = backends.new("numpy")
    b = backend.builder("blocks")
    zeros = b.constant(np.zeros((1, 1, count, 1), np.float32))
    values = b.constant(np.arange(count, dtype=np.float32), 1, 1, count, 1)
    mask = b.constant(np.tri(count, dtype=bool), 1, 1, count, count) if masked else None
    program = b.compile(b.scaled_dot_product_attention(zeros, zeros, values, mask, is_causal=not masked))
    found = backend.buffer_to_numpy(program.execute([])[0])
    assert count * count > 2 * BLOCK
    np.testing.assert_allclose(found.ravel(), np.arange(count) / 2, rtol=1e-5)
