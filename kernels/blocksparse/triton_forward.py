"""The forward kernel: online softmax over the listed blocks of keys (Dao, https://arxiv.org/abs/2307.08691)."""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import (
    exponential,
    keep_tile,
    load_tile,
    sink_score,
    store_logsumexp,
    store_tile,
    tile_pointers,
)
from easytorch.kernels.blocksparse.triton_tiles import seen_scores


@triton.jit
def _attend(
    output, l_i, m_i, query, row_start, index, first, last, begin, end, key, value, key_strides, value_strides, bias,
    bias_strides, mask, mask_strides, query_ids, key_ids, key_id_strides, seed, threshold, head, T, S, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Fold the blocks index[first:last] of keys into the running (output, l_i, m_i) of BLOCK_M rows."""
    local_rows = tl.arange(0, BLOCK_M)[:, None]
    local_columns = tl.arange(0, BLOCK_N)[None, :]
    rows = row_start + local_rows
    for place in range(first, last):
        start = tl.load(index + place) * BLOCK_N
        columns = start + local_columns
        bias_pointers = bias
        if bias is not None:
            bias_pointers = tile_pointers(bias, start, bias_strides[3], bias_strides[2], local_columns, local_rows)
        mask_pointers = mask
        if mask is not None:
            mask_pointers = tile_pointers(mask, start, mask_strides[3], mask_strides[2], local_columns, local_rows)
        ids = key_ids
        if PARTIAL and key_ids is not None:
            ids = tl.load(key_ids + columns * key_id_strides[1], mask=columns < S, other=0)
        keys = load_tile(key, start, S, key_strides[1], key_strides[3], BLOCK_N, D, BLOCK_D, PARTIAL)
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores, _ = seen_scores(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, ids, begin, end, PARTIAL
        )
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # a row that has seen nothing yet has no maximum: -inf - -inf is NaN
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = exponential(scores - origin[:, None], NATURAL)
        alpha = exponential(m_i - origin, NATURAL)
        l_i = l_i * alpha + tl.sum(weights, 1)
        if seed is not None:
            weights = tl.where(keep_tile(seed, head, rows, columns, threshold), weights, 0.0)
        values = load_tile(value, start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, PARTIAL)
        output = tl.dot(weights.to(values.dtype), values, output * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return output, l_i, m_i


@triton.jit
def blocksparse_forward(
    query, key, value, output, lse, begin, end, index, partial, total_blocks, bias, mask, query_ids, key_ids, sinks,
    seed, query_strides, key_strides, value_strides, output_strides, bias_strides, mask_strides, query_id_strides,
    key_id_strides, interval_stride, index_strides, H, GROUP, T, S, scale, cap, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_M queries of one head. Writes output (B, T, H, DV), lse (B, H, 2, T), contiguous.

    lse: as in triton_flash_forward.py. index_strides: of batch and block in `index`, then of the batch in `partial` and
    `total_blocks`.
    """
    blocks = tl.cdiv(T, BLOCK_M)
    # with a causal mask the last blocks have the most keys: they start first
    block = blocks - 1 - tl.program_id(0) % blocks
    row_start = block * BLOCK_M
    head = tl.program_id(0) // blocks
    b = (head // H).to(tl.int64)
    h = head % H
    kv_head = h // GROUP
    query += b * query_strides[0] + h * query_strides[2]
    key += b * key_strides[0] + kv_head * key_strides[2]
    value += b * value_strides[0] + kv_head * value_strides[2]
    output += b * output_strides[0] + h * output_strides[2]
    rows = row_start + tl.arange(0, BLOCK_M)
    if bias is not None:
        bias += b * bias_strides[0] + h * bias_strides[1] + row_start.to(tl.int64) * bias_strides[2]
    if mask is not None:
        mask += b * mask_strides[0] + h * mask_strides[1] + row_start.to(tl.int64) * mask_strides[2]
    row_ids = query_ids
    if query_ids is not None:
        key_ids += b * key_id_strides[0]
        row_ids = tl.load(query_ids + b * query_id_strides[0] + rows * query_id_strides[1], mask=rows < T, other=0)
        row_ids = row_ids[:, None]
    row_begin = tl.load(begin + b * interval_stride + rows, mask=rows < T, other=0)[:, None]
    row_end = tl.load(end + b * interval_stride + rows, mask=rows < T, other=0)[:, None]

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        m_i = tl.zeros((BLOCK_M,), tl.float32) + sink_score(tl.load(sinks + h), NATURAL)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    result = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    queries = load_tile(query, row_start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, True)

    index += b * index_strides[0] + block.to(tl.int64) * index_strides[1]
    masked = tl.load(partial + b * index_strides[2] + block)
    listed = tl.load(total_blocks + b * index_strides[2] + block)
    result, l_i, m_i = _attend(
        result, l_i, m_i, queries, row_start, index, 0, masked, row_begin, row_end, key, value, key_strides,
        value_strides, bias, bias_strides, mask, mask_strides, row_ids, key_ids, key_id_strides, seed, threshold, head,
        T, S, scale, cap, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, True,
    )  # fmt: skip
    result, l_i, m_i = _attend(
        result, l_i, m_i, queries, row_start, index, masked, listed, row_begin, row_end, key, value, key_strides,
        value_strides, bias, bias_strides, mask, mask_strides, row_ids, key_ids, key_id_strides, seed, threshold, head,
        T, S, scale, cap, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, False,
    )  # fmt: skip

    result = result / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if seed is not None:
        result = result * keep_scale
    store_tile(output, result, row_start, T, output_strides[1], output_strides[3], BLOCK_M, DV, BLOCK_DV)
    store_logsumexp(lse + head.to(tl.int64) * 2 * T, rows, T, m_i, l_i, NATURAL)
