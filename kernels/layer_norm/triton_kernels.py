"""Normalization over the last dimension in Triton, forward and backward: layer norm and, without a mean, RMS norm.

A program computes whole rows, several where they are short. `mean` is None for RMS norm, which rounds the normalized
row to x's dtype before the weight (kernels/rms_norm/native.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, weight, bias, output, mean, rstd, x_stride, ROWS, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Fills output (ROWS, N), contiguous, and mean and rstd (ROWS,) float32. One program per block of BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    at = rows.to(tl.int64)[:, None]
    inside = (at < ROWS) & (columns < N)
    tile = tl.load(x + at * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if mean is not None:
        average = tl.sum(tile, 1) / N
        tl.store(mean + rows, average, mask=rows < ROWS)
        tile = tl.where(inside, tile - average[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(tile * tile, 1) / N + eps)
    tl.store(rstd + rows, scale, mask=rows < ROWS)
    tile *= scale[:, None]
    if mean is None:
        tile = tile.to(x.dtype.element_ty).to(tl.float32)
    if weight is not None:
        tile *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    if bias is not None:
        tile += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(output + at * N + columns, tile.to(output.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad, x, weight, mean, rstd, x_grad, weight_parts, bias_parts, grad_stride, x_stride, ROWS, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fills x_grad (ROWS, N), contiguous, and row program_id of weight_parts and bias_parts (programs, N) float32.

    With y = (x - mean) * rstd and g = grad * weight: x_grad = rstd * (g - mean(g) - y * mean(g * y)). The gradients of
    weight and bias are summed over the rows of a program, and over programs by the caller: no atomics, so results are
    deterministic.
    """
    columns = tl.arange(0, BLOCK_N)[None, :]
    weights = tl.full((1, BLOCK_N), 1.0, tl.float32)
    if weight is not None:
        weights = tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    bias_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_M, ROWS, tl.num_programs(0) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        at = rows.to(tl.int64)[:, None]
        inside = (at < ROWS) & (columns < N)
        normalized = tl.load(x + at * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            average = tl.load(mean + rows, mask=rows < ROWS, other=0.0)
            normalized = tl.where(inside, normalized - average[:, None], 0.0)
        scale = tl.load(rstd + rows, mask=rows < ROWS, other=0.0)[:, None]
        normalized *= scale
        upstream = tl.load(grad + at * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if weight_parts is not None:
            weight_sum += upstream * normalized
        if bias_parts is not None:
            bias_sum += upstream
        upstream *= weights
        result = upstream - normalized * (tl.sum(upstream * normalized, 1) / N)[:, None]
        if mean is not None:
            result -= (tl.sum(upstream, 1) / N)[:, None]
        tl.store(x_grad + at * N + columns, (result * scale).to(x_grad.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * N + columns
    if weight_parts is not None:
        tl.store(weight_parts + part, tl.sum(weight_sum, 0)[None, :], mask=columns < N)
    if bias_parts is not None:
        tl.store(bias_parts + part, tl.sum(bias_sum, 0)[None, :], mask=columns < N)
