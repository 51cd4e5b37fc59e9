"""The forward kernel of flash attention: online softmax over blocks of keys (Dao, https://arxiv.org/abs/2307.08691)."""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import (
    band_limits,
    exponential,
    keep_tile,
    load_tile,
    score_tile,
    sink_score,
    store_logsumexp,
    store_tile,
    tile_pointers,
)


@triton.jit
def _attend(
    output, l_i, m_i, query, row_start, begin, end, key, value, key_strides, value_strides, bias, bias_strides, mask,
    mask_strides, query_ids, key_ids, key_id_strides, seed, threshold, head, T, S, left, right, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Fold keys [begin, end) into the running (output, l_i, m_i) of BLOCK_M rows; begin is a multiple of BLOCK_N."""
    local_rows = tl.arange(0, BLOCK_M)[:, None]
    local_columns = tl.arange(0, BLOCK_N)[None, :]
    rows = row_start + local_rows
    for start in range(begin, end, BLOCK_N):
        columns = start + local_columns
        bias_pointers = bias
        if bias is not None:
            bias_pointers = tile_pointers(bias, start, bias_strides[3], bias_strides[2], local_columns, local_rows)
        mask_pointers = mask
        if mask is not None:
            mask_pointers = tile_pointers(mask, start, mask_strides[3], mask_strides[2], local_columns, local_rows)
        ids = key_ids
        if key_ids is not None:
            ids = tl.load(key_ids + columns * key_id_strides[1], mask=columns < S, other=0)
        keys = load_tile(key, start, S, key_strides[1], key_strides[3], BLOCK_N, D, BLOCK_D, BOUNDARY)
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores, _ = score_tile(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, ids, left, right,
            BOUNDARY,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        origin = m_new
        if BOUNDARY or bias is not None or mask is not None or key_ids is not None:
            # a row that has seen nothing yet has no maximum: -inf - -inf is NaN
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = exponential(scores - origin[:, None], NATURAL)
        alpha = exponential(m_i - origin, NATURAL)
        l_i = l_i * alpha + tl.sum(weights, 1)
        if seed is not None:
            weights = tl.where(keep_tile(seed, head, rows, columns, threshold), weights, 0.0)
        values = load_tile(value, start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, BOUNDARY)
        output = tl.dot(weights.to(values.dtype), values, output * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return output, l_i, m_i


@triton.jit
def flash_forward(
    query, key, value, output, lse, bias, mask, query_ids, key_ids, sinks, seed,
    query_strides, key_strides, value_strides, output_strides, bias_strides, mask_strides, query_id_strides,
    key_id_strides, H, GROUP, T, S, left, right, scale, cap, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_M queries of one head. Writes output (B, T, H, DV), lse (B, H, 2, T), contiguous.

    lse is in the two parts of logsumexp.py, in units of the scores: NATURAL, or of log2.
    """
    blocks = tl.cdiv(T, BLOCK_M)
    # with a causal mask the last blocks have the most keys: they start first
    row_start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
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

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        m_i = tl.zeros((BLOCK_M,), tl.float32) + sink_score(tl.load(sinks + h), NATURAL)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    result = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    queries = load_tile(query, row_start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, True)

    first = row_start + (S - T)
    last = tl.minimum(row_start + BLOCK_M, T) - 1 + (S - T)
    limits = band_limits(first, last, left, right, S, BLOCK_N)
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            result, l_i, m_i = _attend(
                result, l_i, m_i, queries, row_start, limits[part], limits[part + 1], key, value, key_strides,
                value_strides, bias, bias_strides, mask, mask_strides, row_ids, key_ids, key_id_strides, seed,
                threshold, head, T, S, left, right, scale, cap,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, part != 1,
            )  # fmt: skip

    result = result / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if seed is not None:
        result = result * keep_scale
    store_tile(output, result, row_start, T, output_strides[1], output_strides[3], BLOCK_M, DV, BLOCK_DV)
    store_logsumexp(lse + head.to(tl.int64) * 2 * T, rows, T, m_i, l_i, NATURAL)
