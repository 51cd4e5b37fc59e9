"""The backward kernels of flash attention for the queries: delta, then dQ and the gradient of the bias.

The formulas are in triton_flash_backward_keys.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import (
    band_limits,
    exponential,
    keep_tile,
    load_logsumexp,
    load_tile,
    score_tile,
    store_tile,
    tile_pointers,
)


@triton.jit
def flash_delta(
    output, output_grad, delta, output_strides, grad_strides, H, T,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta (B, H, T) float32, contiguous: sum over DV of output * output_grad. One program per block of one head."""
    blocks = tl.cdiv(T, BLOCK_M)
    row_start = tl.program_id(0) % blocks * BLOCK_M
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b = head // H
    h = head % H
    output += b * output_strides[0] + h * output_strides[2]
    output_grad += b * grad_strides[0] + h * grad_strides[2]
    out = load_tile(output, row_start, T, output_strides[1], output_strides[3], BLOCK_M, DV, BLOCK_DV, True)
    grad = load_tile(output_grad, row_start, T, grad_strides[1], grad_strides[3], BLOCK_M, DV, BLOCK_DV, True)
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(delta + head * T + rows, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), mask=rows < T)


@triton.jit
def _fold_keys(
    query_grad, queries, grads, row_max, row_log_sum, row_delta, row_start, begin, end, key, value, key_strides,
    value_strides, bias, bias_strides, bias_grad, bias_grad_strides, mask, mask_strides, query_ids, key_ids,
    key_id_strides, seed, threshold, keep_scale, head, T, S, left, right, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Add what keys [begin, end) give to query_grad, write their part of bias_grad; score tiles are (queries, keys)."""
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
        values = load_tile(value, start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, BOUNDARY)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, capped = score_tile(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, ids, left, right,
            BOUNDARY,
        )  # fmt: skip
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
def flash_query_grad(
    query, key, value, output_grad, lse, delta, query_grad, bias, bias_grad, mask, query_ids, key_ids, seed,
    query_strides, key_strides, value_strides, grad_strides, query_grad_strides, bias_strides, bias_grad_strides,
    mask_strides, query_id_strides, key_id_strides, H, GROUP, T, S, left, right, scale, cap, softmax_scale, threshold,
    keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_M queries and head: query_grad (B, T, H, D), bias_grad (B, H, T, S) where seen."""
    blocks = tl.cdiv(T, BLOCK_M)
    row_start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
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
    row_max, row_log_sum = load_logsumexp(lse + head * 2 * T, rows, T)
    row_delta = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
    queries = load_tile(query, row_start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, True)
    grads = load_tile(output_grad, row_start, T, grad_strides[1], grad_strides[3], BLOCK_M, DV, BLOCK_DV, True)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    first = row_start + (S - T)
    last = tl.minimum(row_start + BLOCK_M, T) - 1 + (S - T)
    limits = band_limits(first, last, left, right, S, BLOCK_N)
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            result = _fold_keys(
                result, queries, grads, row_max, row_log_sum, row_delta, row_start, limits[part], limits[part + 1], key,
                value, key_strides, value_strides, bias, bias_strides, bias_grad, bias_grad_strides, mask, mask_strides,
                row_ids, key_ids, key_id_strides, seed, threshold, keep_scale, head, T, S, left, right, scale, cap,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, part != 1,
            )  # fmt: skip
    store_tile(
        query_grad, result * softmax_scale, row_start, T, query_grad_strides[1], query_grad_strides[3],
        BLOCK_M, D, BLOCK_D,
    )  # fmt: skip
