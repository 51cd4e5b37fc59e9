"""The backward kernel for the queries: dQ and the gradient of the bias, over the listed blocks of keys.

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
def _fold_keys(
    query_grad, queries, grads, row_max, row_log_sum, row_delta, row_start, index, first, last, begin, end, key, value,
    key_strides, value_strides, bias, bias_strides, bias_grad, bias_grad_strides, mask, mask_strides, query_ids,
    key_ids, key_id_strides, seed, threshold, keep_scale, head, T, S, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the blocks index[first:last] of keys to query_grad, and write their part of bias_grad."""
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
        values = load_tile(value, start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, PARTIAL)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, capped = seen_scores(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, ids, begin, end, PARTIAL
        )
        weights = exponential(scores - row_max[:, None] - row_log_sum[:, None], NATURAL)
        weight_grad = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        if seed is not None:
            keep = keep_tile(seed, head, rows, columns, threshold)
            weight_grad = tl.where(keep, weight_grad * keep_scale, 0.0)
        score_grad = weights * (weight_grad - row_delta[:, None])
        if bias_grad is not None:
            into = tile_pointers(
                bias_grad, start, bias_grad_strides[3], bias_grad_strides[2], local_columns, local_rows
            )
            tl.store(into, score_grad, mask=(rows < T) & (columns < S))
        if cap is not None:
            score_grad = score_grad * (1.0 - capped * capped)
        query_grad = tl.dot(score_grad.to(keys.dtype), keys, query_grad, input_precision=PRECISION)
    return query_grad


@triton.jit
def blocksparse_query_grad(
    query, key, value, output_grad, lse, delta, query_grad, begin, end, index, partial, total_blocks, bias, bias_grad,
    mask, query_ids, key_ids, seed, query_strides, key_strides, value_strides, grad_strides, query_grad_strides,
    bias_strides, bias_grad_strides, mask_strides, query_id_strides, key_id_strides, interval_stride, index_strides, H,
    GROUP, T, S, scale, cap, softmax_scale, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_M queries and head: query_grad (B, T, H, D), bias_grad (B, H, T, S) where seen."""
    blocks = tl.cdiv(T, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    row_start = block * BLOCK_M
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    kv_head = h // GROUP
    query += b * query_strides[0] + h * query_strides[2]
    output_grad += b * grad_strides[0] + h * grad_strides[2]
    key += b * key_strides[0] + kv_head * key_strides[2]
    value += b * value_strides[0] + kv_head * value_strides[2]
    query_grad += b * query_grad_strides[0] + h * query_grad_strides[2]
    rows = row_start + tl.arange(0, BLOCK_M)
    if bias is not None:
        bias += b * bias_strides[0] + h * bias_strides[1] + row_start.to(tl.int64) * bias_strides[2]
    if bias_grad is not None:
        bias_grad += b * bias_grad_strides[0] + h * bias_grad_strides[1] + row_start.to(tl.int64) * bias_grad_strides[2]
    if mask is not None:
        mask += b * mask_strides[0] + h * mask_strides[1] + row_start.to(tl.int64) * mask_strides[2]
    row_ids = query_ids
    if query_ids is not None:
        key_ids += b * key_id_strides[0]
        row_ids = tl.load(query_ids + b * query_id_strides[0] + rows * query_id_strides[1], mask=rows < T, other=0)
        row_ids = row_ids[:, None]
    row_begin = tl.load(begin + b * interval_stride + rows, mask=rows < T, other=0)[:, None]
    row_end = tl.load(end + b * interval_stride + rows, mask=rows < T, other=0)[:, None]
    row_max, row_log_sum = load_logsumexp(lse + head * 2 * T, rows, T)
    row_delta = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
    queries = load_tile(query, row_start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, True)
    grads = load_tile(output_grad, row_start, T, grad_strides[1], grad_strides[3], BLOCK_M, DV, BLOCK_DV, True)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    index += b * index_strides[0] + block.to(tl.int64) * index_strides[1]
    masked = tl.load(partial + b * index_strides[2] + block)
    listed = tl.load(total_blocks + b * index_strides[2] + block)
    result = _fold_keys(
        result, queries, grads, row_max, row_log_sum, row_delta, row_start, index, 0, masked, row_begin, row_end, key,
        value, key_strides, value_strides, bias, bias_strides, bias_grad, bias_grad_strides, mask, mask_strides,
        row_ids, key_ids, key_id_strides, seed, threshold, keep_scale, head, T, S, scale, cap,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, True,
    )  # fmt: skip
    result = _fold_keys(
        result, queries, grads, row_max, row_log_sum, row_delta, row_start, index, masked, listed, row_begin, row_end,
        key, value, key_strides, value_strides, bias, bias_strides, bias_grad, bias_grad_strides, mask, mask_strides,
        row_ids, key_ids, key_id_strides, seed, threshold, keep_scale, head, T, S, scale, cap,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, False,
    )  # fmt: skip
    store_tile(
        query_grad, result * softmax_scale, row_start, T, query_grad_strides[1], query_grad_strides[3],
        BLOCK_M, D, BLOCK_D,
    )  # fmt: skip
