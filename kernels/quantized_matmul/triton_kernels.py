"""The quantized matmul in Triton, forward and gradient of x: the weight is dequantized in registers.

Every format is read as bytes: fp8 by its bits, which works on GPUs that lack the type.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantized(
    data, scale, zero, levels, row_start, column_start, N, K, data_stride, scale_stride, group_size,
    FORMAT: tl.constexpr, ONE_GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_N, BLOCK_K) of the weight, float32; rows outside are zeros, columns outside any finite number.

    ONE_GROUP: the columns of a tile share their scale.
    """
    rows = (row_start + tl.arange(0, BLOCK_N))[:, None]
    inside = rows < N
    at = rows.to(tl.int64)
    if FORMAT == "int4" or FORMAT == "nf4" or FORMAT == "fp4_e2m1":
        pairs = (column_start // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
        packed = tl.load(data + at * data_stride + pairs, mask=inside & (pairs < (K + 1) // 2), other=0)
        codes = tl.interleave(packed >> 4, packed & 15)
    else:
        columns = (column_start + tl.arange(0, BLOCK_K))[None, :]
        codes = tl.load(data + at * data_stride + columns, mask=inside & (columns < K), other=0)
    if ONE_GROUP:
        parameter_at = at * scale_stride + column_start // group_size
        known = inside
    else:
        columns = (column_start + tl.arange(0, BLOCK_K))[None, :]
        parameter_at = at * scale_stride + columns // group_size
        known = inside & (columns < K)
    factor = tl.load(scale + parameter_at, mask=known, other=0.0)
    if FORMAT == "nf4" or FORMAT == "fp4_e2m1":
        numbers = tl.load(levels + codes.to(tl.int32))
    elif FORMAT == "int4":
        origin = 8.0
        if zero is not None:
            origin = tl.load(zero + parameter_at, mask=known, other=0).to(tl.float32)
        numbers = codes.to(tl.float32) - origin
    elif FORMAT == "int8":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == "fp8_e5m2":
        numbers = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # as float16, whose exponent bias is 15 instead of 7; the NaN code needs a line of its own
        wide = codes.to(tl.uint16)
        half = ((wide & 128) << 8 | (wide & 127) << 7).to(tl.float16, bitcast=True)
        numbers = tl.where((wide & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)
    return numbers * factor


@triton.jit
def quantized_forward(
    x, data, scale, zero, levels, bias, output, x_stride, data_stride, scale_stride, M, N, K, group_size,
    FORMAT: tl.constexpr, ONE_GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills output (SPLITS, M, N), contiguous: each split has the sum over its own blocks of columns.

    Neighbouring programs share the weight's rows, which stay in the L2 cache.
    """
    row_tiles = tl.cdiv(M, BLOCK_M)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    rows = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tile // row_tiles * BLOCK_N
    at = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        columns = (start + tl.arange(0, BLOCK_K))[None, :]
        left = tl.load(at + columns, mask=(rows < M)[:, None] & (columns < K), other=0.0)
        weight = dequantized(
            data, scale, zero, levels, first, start, N, K, data_stride, scale_stride, group_size, FORMAT, ONE_GROUP,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = tl.dot(left, tl.trans(weight.to(left.dtype)), total, input_precision=PRECISION)
    outputs = first + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    place = output + (split.to(tl.int64) * M + rows.to(tl.int64))[:, None] * N + outputs[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=(rows < M)[:, None] & (outputs < N)[None, :])


@triton.jit
def quantized_input_grad(
    grad, data, scale, zero, levels, output, grad_stride, data_stride, scale_stride, M, N, K, group_size,
    FORMAT: tl.constexpr, ONE_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills output (M, K), contiguous, with grad (M, N) @ the weight."""
    row_tiles = tl.cdiv(M, BLOCK_M)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // row_tiles * BLOCK_K
    at = grad + rows.to(tl.int64)[:, None] * grad_stride
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        outputs = (start + tl.arange(0, BLOCK_N))[None, :]
        left = tl.load(at + outputs, mask=(rows < M)[:, None] & (outputs < N), other=0.0)
        weight = dequantized(
            data, scale, zero, levels, start, first, N, K, data_stride, scale_stride, group_size, FORMAT, ONE_GROUP,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = tl.dot(left, weight.to(left.dtype), total, input_precision=PRECISION)
    columns = first + tl.arange(0, BLOCK_K)
    place = output + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=(rows < M)[:, None] & (columns < K)[None, :])
