"""Shape rules against jax's: the same shapes for what fits, and errors for what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easytorch.backends import BackendError, ConvolveAxesConfig, FFTType, OpType, PadAxis, ReduceOpType, make_shape
from easytorch.backends.shapeinference import RULES, accepted_dtypes, infer
from easytorch.backends.shapeinference.windows import window_sizes
from easytorch.backends.types import OP_TYPES

jax = pytest.importorskip("jax")
SIZES = st.integers(0, 4)
# Many settings a second: nothing is compiled.
MANY = settings(max_examples=80, derandomize=True, deadline=None)


def spec(*dims: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(dims, np.dtype(dtype))


def ours(op_type: OpType, *dims: tuple[int, ...], dtype: str = "float32", **attributes: Any) -> tuple[int, ...] | None:
    """The dimensions of the only output, or None where the rule refuses."""
    try:
        (found,) = infer(op_type, [make_shape(dtype, sizes) for sizes in dims], attributes)
    except BackendError as error:
        assert op_type.go_name in str(error) and all(str(make_shape(dtype, sizes)) in str(error) for sizes in dims)
        return None
    return found.dimensions


def theirs(function: Callable[..., Any], *dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The same by jax, which raises TypeError or ValueError (ZeroDivisionError for some strides of zero)."""
    try:
        return jax.eval_shape(function, *(spec(*sizes) for sizes in dims)).shape
    except (TypeError, ValueError, ZeroDivisionError, IndexError):
        return None


@st.composite
def dimensions(draw: st.DrawFn, least: int = 0, most: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


@MANY
@given(dims=dimensions(), other=dimensions())
def test_elements(dims: tuple[int, ...], other: tuple[int, ...]) -> None:
    fits = not dims or not other or len(dims) == len(other)
    wanted = theirs(jax.numpy.add, dims, other) if fits else None
    assert ours(OpType.ADD, dims, other) == wanted


@MANY
@given(dims=dimensions(), order=st.lists(st.integers(0, 4), max_size=4))
def test_transpose(dims: tuple[int, ...], order: list[int]) -> None:
    wanted = theirs(lambda x: jax.lax.transpose(x, order), dims)
    assert ours(OpType.TRANSPOSE, dims, permutations=tuple(order)) == wanted


@MANY
@given(dims=dimensions(), new=dimensions())
def test_reshape(dims: tuple[int, ...], new: tuple[int, ...]) -> None:
    # jax makes nothing of a scalar.
    wanted = theirs(lambda x: jax.lax.reshape(x, new), dims) if math.prod(new) == math.prod(dims) else None
    assert ours(OpType.RESHAPE, dims, dimensions=new) == wanted


@MANY
@given(dims=dimensions(1, 3), data=st.data())
def test_slice(dims: tuple[int, ...], data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 5), min_size=len(dims), max_size=len(dims))
    starts, limits = data.draw(numbers), data.draw(numbers)
    strides = data.draw(st.lists(st.integers(1, 3), min_size=len(dims), max_size=len(dims)))
    wanted = theirs(lambda x: jax.lax.slice(x, starts, limits, strides), dims)
    found = ours(OpType.SLICE, dims, starts=tuple(starts), limits=tuple(limits), strides=tuple(strides))
    assert found == wanted


@MANY
@given(dims=dimensions(1, 3), data=st.data())
def test_pad(dims: tuple[int, ...], data: st.DataObject) -> None:
    ends, inside = st.integers(-4, 3), st.integers(-1, 2)
    pads = data.draw(st.lists(st.tuples(ends, ends, inside), min_size=len(dims), max_size=len(dims)))
    wanted = theirs(lambda x, fill: jax.lax.pad(x, fill, pads), dims, ())
    assert ours(OpType.PAD, dims, (), axes_config=tuple(PadAxis(*pad) for pad in pads)) == wanted


@MANY
@given(dims=dimensions(), axes=st.lists(st.integers(0, 4), max_size=4))
def test_reverse_and_reduce(dims: tuple[int, ...], axes: list[int]) -> None:
    assert ours(OpType.REVERSE, dims, axes=tuple(axes)) == theirs(lambda x: jax.lax.rev(x, axes), dims)
    gone = axes or range(len(dims))
    wanted = theirs(lambda x: jax.lax.reduce_sum_p.bind(x, axes=tuple(gone), out_sharding=None), dims)
    fits = len(set(axes)) == len(axes) and all(axis < len(dims) for axis in axes)
    assert ours(OpType.REDUCE_SUM, dims, axes=tuple(axes)) == (wanted if fits else None)


@MANY
@given(dims=dimensions(1, 3), others=st.lists(dimensions(1, 3), max_size=2), axis=st.integers(0, 3))
def test_concatenate(dims: tuple[int, ...], others: list[tuple[int, ...]], axis: int) -> None:
    operands = [dims, *others, dims]
    wanted = theirs(lambda *x: jax.lax.concatenate(x, axis), *operands)
    assert ours(OpType.CONCATENATE, *operands, axis=axis) == wanted


@MANY
@given(dims=dimensions(0, 2), out=dimensions(0, 3), axes=st.lists(st.integers(0, 3), max_size=2))
def test_broadcast_in_dim(dims: tuple[int, ...], out: tuple[int, ...], axes: list[int]) -> None:
    # jax gives back an array of the same dimensions without looking at the axes.
    wanted = theirs(lambda x: jax.lax.broadcast_in_dim(x, out, axes), dims) if len(axes) == len(dims) else None
    found = ours(OpType.BROADCAST_IN_DIM, dims, output_shape=make_shape("float32", out), broadcast_axes=tuple(axes))
    assert found == wanted


@MANY
@given(left=dimensions(0, 3), right=dimensions(0, 3), data=st.data())
def test_dot_general(left: tuple[int, ...], right: tuple[int, ...], data: st.DataObject) -> None:
    some = st.lists(st.integers(0, 2), max_size=2)
    lc, rc, lb, rb = (tuple(data.draw(some)) for _ in range(4))
    if max((0, *lc, *lb)) >= max(len(left), 1) or max((0, *rc, *rb)) >= max(len(right), 1):
        wanted = None
    else:
        wanted = theirs(lambda x, y: jax.lax.dot_general(x, y, ((lc, rc), (lb, rb))), left, right)
    attributes = {"lhs_contracting_axes": lc, "lhs_batch_axes": lb, "rhs_contracting_axes": rc, "rhs_batch_axes": rb}
    if (not left and (lc or lb)) or (not right and (rc or rb)):
        wanted = None
    assert ours(OpType.DOT_GENERAL, left, right, **attributes) == wanted


@st.composite
def windows(draw: st.DrawFn, rank: int, pads: st.SearchStrategy[int]) -> dict[str, Any]:
    sizes = st.lists(st.integers(1, 3), min_size=rank, max_size=rank).map(tuple)
    paddings = st.lists(st.tuples(pads, pads), min_size=rank, max_size=rank).map(tuple)
    return {
        "window": draw(sizes),
        "strides": draw(sizes),
        "base": draw(sizes),
        "dilation": draw(sizes),
        "paddings": draw(paddings),
    }


@MANY
@given(dims=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), data=st.data())
def test_reduce_window(dims: tuple[int, ...], data: st.DataObject) -> None:
    w = data.draw(windows(len(dims), st.integers(0, 2)))

    def in_jax(x: Any) -> Any:
        settings_ = (w["window"], w["strides"], w["paddings"], w["base"], w["dilation"])
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, *settings_)

    found = ours(
        OpType.REDUCE_WINDOW,
        dims,
        reduction_type=ReduceOpType.SUM,
        window_dimensions=w["window"],
        strides=w["strides"],
        base_dilations=w["base"],
        window_dilations=w["dilation"],
        paddings=w["paddings"],
    )
    assert found == theirs(in_jax, dims)


@MANY
@given(data=st.data(), batch=st.integers(1, 4), channels=st.integers(1, 4), features=st.integers(1, 4))
def test_convolution(data: st.DataObject, batch: int, channels: int, features: int) -> None:
    count = data.draw(st.integers(0, 2))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    w = data.draw(windows(count, st.integers(0, 2)))
    groups, batches, kernel_channels = (data.draw(st.integers(1, 3)) for _ in range(3))
    order = data.draw(st.permutations(range(count + 2)))
    kernel_order = data.draw(st.permutations(range(count + 2)))

    def laid(values: list[int], axes: list[int]) -> tuple[int, ...]:
        return tuple(values[axes.index(axis)] for axis in range(count + 2))

    left = laid([batch, channels, *sizes], list(order))
    right = laid([features, kernel_channels, *w["window"]], list(kernel_order))
    numbers = jax.lax.ConvDimensionNumbers(tuple(order), tuple(kernel_order), tuple(order))
    axes = ConvolveAxesConfig(
        order[0],
        order[1],
        tuple(order[2:]),
        kernel_order[1],
        kernel_order[0],
        tuple(kernel_order[2:]),
        order[0],
        order[1],
        tuple(order[2:]),
    )
    settings_ = (w["strides"], w["paddings"], w["base"], w["dilation"])
    wanted = theirs(lambda x, y: jax.lax.conv_general_dilated(x, y, *settings_, numbers, groups, batches), left, right)
    found = ours(
        OpType.CONV_GENERAL_DILATED,
        left,
        right,
        axes=axes,
        strides=w["strides"],
        paddings=w["paddings"],
        input_dilation=w["base"],
        filter_dilation=w["dilation"],
        filter_group_count=groups,
        batch_group_count=batches,
    )
    assert found == wanted


@MANY
@given(dims=dimensions(1, 4), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_fft(dims: tuple[int, ...], lengths: list[int]) -> None:
    kind = jax.lax.FftType.RFFT
    wanted = theirs(lambda x: jax.lax.fft(x, kind, tuple(lengths)), dims) if len(lengths) <= len(dims) else None
    found = ours(OpType.FFT, dims, fft_type=FFTType.FORWARD_REAL, fft_length=tuple(lengths))
    assert found == wanted


@pytest.mark.parametrize("op_type", OP_TYPES, ids=str)
def test_what_a_rule_takes_is_what_it_says(op_type: OpType) -> None:
    """`accepted_dtypes` is the rule's own check: any other first operand is refused by its element type."""
    rule = RULES.get(op_type)
    for dtype in set(make_shape("bool").dtype.__class__) - accepted_dtypes(op_type):
        assert rule is not None
        with pytest.raises((BackendError, TypeError), match=f"{dtype.value}|missing"):
            rule(make_shape(dtype, 2, 2))


def test_a_padding_may_crop_an_axis_to_nothing_and_no_further() -> None:
    ones = (1,)
    for crops, windows in (((-1, -1), 1), ((-1, -2), 0), ((2, -5), 0), ((-3, 1), 1)):
        assert window_sizes((3,), ones, ones, ones, ones, (crops,)) == (windows,)
    for crops in ((-2, -2), (-4, 0)):
        with pytest.raises(BackendError, match="crops more than that"):
            window_sizes((3,), ones, ones, ones, ones, (crops,))
