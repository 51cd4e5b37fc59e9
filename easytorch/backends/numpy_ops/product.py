"""Products of arrays: dot, convolution, Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from easytorch.backends.numpy_ops.movement import padded
from easytorch.backends.numpy_ops.narrow import widened
from easytorch.backends.numpy_ops.reduction import windows
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType, PadAxis

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
    product = np.matmul(
        left.reshape(*batch, math.prod(rows), inner),
        right.reshape(*batch, inner, math.prod(columns)),
    )
    return product.reshape((*batch, *rows, *columns))


def _dot(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    return np.matmul(x0, x1)


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
    count = len(strides)
    # (S.., N, C) and (O, C, K..): the windows of the operand are (S.., N, C, K..).
    inputs = operand.transpose(*axes.input_spatial, axes.input_batch, axes.input_channel)
    kernel = filter.transpose(axes.kernel_output_channel, axes.kernel_input_channel, *axes.kernel_spatial)
    pads = [PadAxis(*ends, dilation - 1) for ends, dilation in zip(paddings, input_dilation, strict=True)]
    wide = padded(inputs, np.zeros((), operand.dtype), pads)
    places = windows(wide, kernel.shape[2:], strides, filter_dilation)
    # A group takes its part of the input channels or of the batch, and its part of the kernel's outputs.
    cut = count + 1 if filter_group_count > 1 else count
    groups = filter_group_count * batch_group_count
    inner = (*range(count + 1, 2 * count + 2),)
    parts = [
        np.tensordot(part, weights, axes=(inner, (*range(1, count + 2),)))
        for part, weights in zip(np.split(places, groups, cut), np.split(kernel, groups), strict=True)
    ]
    result = np.concatenate(parts, -1)
    order = (*axes.output_spatial, axes.output_batch, axes.output_channel)
    return result.transpose(np.argsort(order))


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
}
