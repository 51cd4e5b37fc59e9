"""Products of arrays: dot, convolution, Fourier transforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from easytorch.backends.reference.narrow import widened
from easytorch.backends.shapeinference.windows import window_sizes
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType

Axes = tuple[int, ...]


def _dot_general(
    lhs: np.ndarray,
    rhs: np.ndarray,
    lhs_contracting_axes: Axes,
    lhs_batch_axes: Axes,
    rhs_contracting_axes: Axes,
    rhs_batch_axes: Axes,
) -> np.ndarray:
    lhs_free = [axis for axis in range(lhs.ndim) if axis not in (*lhs_batch_axes, *lhs_contracting_axes)]
    rhs_free = [axis for axis in range(rhs.ndim) if axis not in (*rhs_batch_axes, *rhs_contracting_axes)]
    batch = [lhs.shape[axis] for axis in lhs_batch_axes]
    inner = math.prod(lhs.shape[axis] for axis in lhs_contracting_axes)
    rows, columns = [lhs.shape[axis] for axis in lhs_free], [rhs.shape[axis] for axis in rhs_free]
    left = lhs.transpose(*lhs_batch_axes, *lhs_free, *lhs_contracting_axes)
    right = rhs.transpose(*rhs_batch_axes, *rhs_contracting_axes, *rhs_free)
    product = _dot(
        left.reshape(*batch, math.prod(rows), inner),
        right.reshape(*batch, inner, math.prod(columns)),
    )
    return product.reshape((*batch, *rows, *columns))


def _dot(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    return np.asarray(np.matmul(x0, x1))


def _convolution(
    operand: np.ndarray,
    filter: np.ndarray,
    axes: ConvolveAxesConfig,
    strides: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
    input_dilation: tuple[int, ...],
    filter_dilation: tuple[int, ...],
    filter_group_count: int,
    batch_group_count: int,
) -> np.ndarray:
    """Adds up one filter tap at a time: no intermediate is larger than the operands and the result, whatever the
    padding."""
    count = len(strides)
    # (S.., N, C) and (K.., C, O), both in groups.
    inputs = operand.transpose(*axes.input_spatial, axes.input_batch, axes.input_channel)
    kernel = filter.transpose(*axes.kernel_spatial, axes.kernel_input_channel, axes.kernel_output_channel)
    settings = (strides, input_dilation, filter_dilation, paddings)
    places = window_sizes(inputs.shape[:count], kernel.shape[:count], *settings)
    batch, features = inputs.shape[count] // batch_group_count, kernel.shape[-1]
    result = np.zeros((*places, batch, features), operand.dtype)
    groups = filter_group_count * batch_group_count
    # Each group has its part of the input channels or of the batch, and its part of the filter's output channels.
    cut = count + 1 if filter_group_count > 1 else count
    parts = list(
        zip(
            np.split(inputs, groups, cut),
            np.split(kernel, groups, count + 1),
            np.split(result, groups, count + 1),
            strict=True,
        )
    )
    rows = [
        _taps(*sizes)
        for sizes in zip(
            inputs.shape, kernel.shape, places, strides, input_dilation, filter_dilation, paddings, strict=False
        )
    ]
    for taps in itertools.product(*rows):
        offsets, taken, written = zip(*taps, strict=True) if taps else ((), (), ())
        for source, weights, target in parts:
            target[written] += source[taken] @ weights[offsets]
    order = (*axes.output_spatial, axes.output_batch, axes.output_channel)
    return result.transpose(np.argsort(order))


def _taps(
    size: int, taps: int, places: int, stride: int, dilation: int, tap_dilation: int, padding: tuple[int, int]
) -> list[tuple[int, slice, slice]]:
    """For each filter tap along an axis that reads any element: (tap, slice of the input, slice of the output)."""
    found = []
    for tap in range(taps):
        # Output p reads input e where p * stride + shift == e * dilation.
        shift = tap * tap_dilation - padding[0]
        common = math.gcd(stride, dilation)
        if shift % common:
            continue
        step, steps = dilation // common, stride // common
        first = -(shift // common) * pow(steps, -1, step) % step if step > 1 else 0
        # From the first output of this residue whose input index is not negative.
        least = max(-((shift + first * stride) // (step * stride)), 0)
        begin = first + least * step
        element = (begin * stride + shift) // dilation
        count = min(-(-(places - begin) // step), -(-(size - element) // steps))
        if count > 0:
            taken = slice(element, element + (count - 1) * steps + 1, steps)
            found.append((tap, taken, slice(begin, begin + (count - 1) * step + 1, step)))
    return found


def _triangular_solve(
    a: np.ndarray, b: np.ndarray, left_side: bool, lower: bool, unit_diagonal: bool, adjoint: bool
) -> np.ndarray:
    """Substitution: each row of x from the rows before it."""
    matrix = a.conj().swapaxes(-1, -2) if adjoint else a
    if not left_side:
        matrix, b = matrix.swapaxes(-1, -2), b.swapaxes(-1, -2)
    forward = lower is not (adjoint is left_side)
    count = a.shape[-1]
    x = np.zeros_like(b)
    for row in range(count) if forward else reversed(range(count)):
        known = slice(0, row) if forward else slice(row + 1, count)
        rest = b[..., row, :] - np.einsum("...k,...kn->...n", matrix[..., row, known], x[..., known, :])
        x[..., row, :] = rest if unit_diagonal else rest / matrix[..., row, row, None]
    return x if left_side else x.swapaxes(-1, -2)


_TRANSFORMS: dict[FFTType, Any] = {
    FFTType.FORWARD: np.fft.fftn,
    FFTType.INVERSE: np.fft.ifftn,
    FFTType.FORWARD_REAL: np.fft.rfftn,
    FFTType.INVERSE_REAL: np.fft.irfftn,
}


def _fft(operand: np.ndarray, fft_type: FFTType, fft_length: tuple[int, ...]) -> np.ndarray:
    axes = tuple(range(operand.ndim - len(fft_length), operand.ndim))
    double = operand.astype(np.complex128 if np.iscomplexobj(operand) else np.float64)
    result: np.ndarray = _TRANSFORMS[fft_type](double, fft_length, axes)
    single = operand.dtype in (np.dtype(np.float32), np.dtype(np.complex64))
    if np.iscomplexobj(result):
        return result.astype(np.complex64 if single else np.complex128)
    return result.astype(np.float32 if single else np.float64)


PRODUCT: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.DOT: widened(_dot),
    OpType.DOT_GENERAL: widened(_dot_general),
    OpType.CONV_GENERAL_DILATED: widened(_convolution),
    OpType.FFT: _fft,
    OpType.TRIANGULAR_SOLVE: widened(_triangular_solve),
}
