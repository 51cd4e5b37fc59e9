"""The grouped matmul in Triton. Which tile belongs to which group is read on the device.

`bounds` (E + 2,) int32: how many row tiles come before each group; a last, nameless group holds the rows that belong to
no expert, which become zeros. `edges` (E + 2,) int32: at which row each group starts, and M.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_forward(
    x, weight, bias, output, bounds, edges, x_stride, expert_stride, k_stride, n_stride, E, K, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills output (M, N), contiguous. Persistent: program p of n takes every n-th tile from p on.

    BAND row tiles of a group go through the columns together, so that both operands are found in the cache.
    """
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(bounds + 1 + experts, mask=experts <= E, other=2147483647)
    column_tiles = tl.cdiv(N, BLOCK_N)
    tiles = tl.load(bounds + E + 1) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tl.sum((ends <= tile // column_tiles).to(tl.int32), 0)
        first = tl.load(bounds + group)
        row_tiles = tl.load(bounds + group + 1) - first
        inner = tile - first * column_tiles
        band = inner // (BAND * column_tiles) * BAND
        height = tl.minimum(row_tiles - band, BAND)
        inner = inner % (BAND * column_tiles)
        rows = tl.load(edges + group) + (band + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
        row_inside, column_inside = (rows < tl.load(edges + group + 1))[:, None], (columns < N)[None, :]
        depths = tl.arange(0, BLOCK_K)
        x_at = x + rows.to(tl.int64)[:, None] * x_stride + depths[None, :]
        weight_at = weight + group.to(tl.int64) * expert_stride
        weight_at += depths.to(tl.int64)[:, None] * k_stride + columns.to(tl.int64)[None, :] * n_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, tl.where(group < E, K, 0), BLOCK_K):
            left = tl.load(x_at, mask=row_inside & (depths < K - start)[None, :], other=0.0)
            right = tl.load(weight_at, mask=column_inside & (depths < K - start)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            x_at += BLOCK_K
            weight_at += BLOCK_K * k_stride
        if bias is not None:
            bias_at = bias + group.to(tl.int64) * N + columns
            added = tl.load(bias_at, mask=columns < tl.where(group < E, N, 0), other=0.0)
            total += added.to(tl.float32)[None, :]
        at = output + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, total.to(output.dtype.element_ty), mask=row_inside & column_inside)


@triton.jit
def grouped_weight_grad(
    left, right, output, edges, left_stride, right_stride, A, B,
    BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills output (E, A, B), contiguous, with left^T (A, m) @ right (m, B) of each group. One program per tile."""
    a_tiles, b_tiles = tl.cdiv(A, BLOCK_A), tl.cdiv(B, BLOCK_B)
    group = tl.program_id(0) // (a_tiles * b_tiles)
    tile = tl.program_id(0) % (a_tiles * b_tiles)
    a = tile // b_tiles * BLOCK_A + tl.arange(0, BLOCK_A)
    b = tile % b_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    end = tl.load(edges + group + 1)
    total = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for start in range(tl.load(edges + group), end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        at, inside = rows.to(tl.int64), rows < end
        first = tl.load(
            left + at[None, :] * left_stride + a[:, None], mask=inside[None, :] & (a < A)[:, None], other=0.0
        )
        second = tl.load(
            right + at[:, None] * right_stride + b[None, :], mask=inside[:, None] & (b < B)[None, :], other=0.0
        )
        total = tl.dot(first, second, total, input_precision=PRECISION)
    at = output + group.to(tl.int64) * A * B + a.to(tl.int64)[:, None] * B + b[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=(a < A)[:, None] & (b < B)[None, :])
