"""The backward kernel for the keys: dK and dV, by blocks of keys, over the listed blocks of queries.

The formulas are in kernels/attention/triton_flash_backward_keys.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import (
    exponential,
    keep_tile,
    load_logsumexp,
    load_tile,
    store_tile,
    tile_pointers,
)
from easytorch.kernels.blocksparse.triton_tiles import seen_scores


@triton.jit
def _fold_queries(
    key_grad, value_grad, keys, values, column_start, index, first, last, begin, end, query, output_grad, lse, delta,
    query_strides, grad_strides, bias, bias_strides, mask, mask_strides, query_ids, query_id_strides, key_ids, seed,
    threshold, keep_scale, head, T, S, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add what the blocks index[first:last] of queries give to (key_grad, value_grad); tiles are (keys, queries)."""
    local_rows = tl.arange(0, BLOCK_M)[None, :]
    local_columns = tl.arange(0, BLOCK_N)[:, None]
    columns = column_start + local_columns
    for place in range(first, last):
        start = tl.load(index + place) * BLOCK_M
        rows = start + local_rows
        bias_pointers = bias
        if bias is not None:
            bias_pointers = tile_pointers(bias, start, bias_strides[2], bias_strides[3], local_rows, local_columns)
        mask_pointers = mask
        if mask is not None:
            mask_pointers = tile_pointers(mask, start, mask_strides[2], mask_strides[3], local_rows, local_columns)
        ids = query_ids
        if PARTIAL and query_ids is not None:
            ids = tl.load(query_ids + rows * query_id_strides[1], mask=rows < T, other=0)
        # a full block may reach beyond T, where a row has no weights: its lse is +inf
        queries = load_tile(query, start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, True)
        grads = load_tile(output_grad, start, T, grad_strides[1], grad_strides[3], BLOCK_M, DV, BLOCK_DV, True)
        row_max, row_log_sum = load_logsumexp(lse, rows, T)
        row_delta = tl.load(delta + rows, mask=rows < T, other=0.0)
        row_begin = begin
        row_end = end
        if PARTIAL:
            row_begin = tl.load(begin + rows, mask=rows < T, other=0)
            row_end = tl.load(end + rows, mask=rows < T, other=0)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        scores, capped = seen_scores(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, ids, key_ids, row_begin, row_end,
            PARTIAL,
        )  # fmt: skip
        weights = exponential(scores - row_max - row_log_sum, NATURAL)
        kept = weights
        weight_grad = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        if seed is not None:
            keep = keep_tile(seed, head, rows, columns, threshold)
            kept = tl.where(keep, weights * keep_scale, 0.0)
            weight_grad = tl.where(keep, weight_grad * keep_scale, 0.0)
        value_grad = tl.dot(kept.to(grads.dtype), grads, value_grad, input_precision=PRECISION)
        score_grad = weights * (weight_grad - row_delta)
        if cap is not None:
            score_grad = score_grad * (1.0 - capped * capped)
        key_grad = tl.dot(score_grad.to(queries.dtype), queries, key_grad, input_precision=PRECISION)
    return key_grad, value_grad


@triton.jit
def blocksparse_key_value_grad(
    query, key, value, output_grad, lse, delta, key_grad, value_grad, begin, end, index, partial, total_blocks, bias,
    mask, query_ids, key_ids, seed, query_strides, key_strides, value_strides, grad_strides, key_grad_strides,
    value_grad_strides, bias_strides, mask_strides, query_id_strides, key_id_strides, interval_stride, index_strides, H,
    GROUP, T, S, scale, cap, softmax_scale, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_N keys of one key/value head: key_grad (B, S, K, D), value_grad (B, S, K, DV)."""
    blocks = tl.cdiv(S, BLOCK_N)
    # with a causal mask the first keys have the most queries: they start first
    block = tl.program_id(0) % blocks
    column_start = block * BLOCK_N
    kv_heads = H // GROUP
    b = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) // blocks % kv_heads
    key += b * key_strides[0] + kv_head * key_strides[2]
    value += b * value_strides[0] + kv_head * value_strides[2]
    key_grad += b * key_grad_strides[0] + kv_head * key_grad_strides[2]
    value_grad += b * value_grad_strides[0] + kv_head * value_grad_strides[2]
    begin += b * interval_stride
    end += b * interval_stride
    columns = column_start + tl.arange(0, BLOCK_N)
    if query_ids is not None:
        query_ids += b * query_id_strides[0]
    column_ids = key_ids
    if key_ids is not None:
        column_ids = tl.load(key_ids + b * key_id_strides[0] + columns * key_id_strides[1], mask=columns < S, other=0)
        column_ids = column_ids[:, None]
    keys = load_tile(key, column_start, S, key_strides[1], key_strides[3], BLOCK_N, D, BLOCK_D, True)
    values = load_tile(value, column_start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, True)
    key_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_sum = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)

    index += b * index_strides[0] + block.to(tl.int64) * index_strides[1]
    masked = tl.load(partial + b * index_strides[2] + block)
    listed = tl.load(total_blocks + b * index_strides[2] + block)
    for member in range(GROUP):
        h = kv_head * GROUP + member
        head = b * H + h
        q = query + b * query_strides[0] + h * query_strides[2]
        grad = output_grad + b * grad_strides[0] + h * grad_strides[2]
        head_lse = lse + head * 2 * T
        head_delta = delta + head * T
        head_bias = bias
        if bias is not None:
            head_bias = bias + b * bias_strides[0] + h * bias_strides[1] + column_start.to(tl.int64) * bias_strides[3]
        head_mask = mask
        if mask is not None:
            head_mask = mask + b * mask_strides[0] + h * mask_strides[1] + column_start.to(tl.int64) * mask_strides[3]
        key_sum, value_sum = _fold_queries(
            key_sum, value_sum, keys, values, column_start, index, 0, masked, begin, end, q, grad, head_lse, head_delta,
            query_strides, grad_strides, head_bias, bias_strides, head_mask, mask_strides, query_ids, query_id_strides,
            column_ids, seed, threshold, keep_scale, head, T, S, scale, cap,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, True,
        )  # fmt: skip
        key_sum, value_sum = _fold_queries(
            key_sum, value_sum, keys, values, column_start, index, masked, listed, begin, end, q, grad, head_lse,
            head_delta, query_strides, grad_strides, head_bias, bias_strides, head_mask, mask_strides, query_ids,
            query_id_strides, column_ids, seed, threshold, keep_scale, head, T, S, scale, cap,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, False,
        )  # fmt: skip
    key_sum = key_sum * softmax_scale
    store_tile(key_grad, key_sum, column_start, S, key_grad_strides[1], key_grad_strides[3], BLOCK_N, D, BLOCK_D)
    store_tile(
        value_grad, value_sum, column_start, S, value_grad_strides[1], value_grad_strides[3], BLOCK_N, DV, BLOCK_DV
    )
