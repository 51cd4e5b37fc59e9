"""The backward kernel of flash attention for the keys: dK and dV, by blocks of keys.

With P the weights, keep the dropout scale (0 or 1 / (1 - p)), c the derivative of the soft cap:

    delta_i = sum_d dO_id O_id          dV_j = sum_i keep_ij P_ij dO_i          dP_ij = keep_ij dO_i . V_j
    dS_ij = P_ij (dP_ij - delta_i)      this is also the gradient of the bias
    dQ_i = scale sum_j c_ij dS_ij K_j   dK_j = scale sum_i c_ij dS_ij Q_i

P is recomputed from lse (https://arxiv.org/abs/2307.08691, section 3.1.2). A program sums over the query heads that
share its key head, so no sum needs an atomic and the result does not depend on the schedule.
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
def _fold_queries(
    key_grad, value_grad, keys, values, column_start, begin, end, query, output_grad, lse, delta, query_strides,
    grad_strides, bias, bias_strides, mask, mask_strides, query_ids, query_id_strides, key_ids, seed, threshold,
    keep_scale, head, T, S, left, right, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Add what queries [begin, end) of one head give to (key_grad, value_grad); score tiles are (keys, queries)."""
    local_rows = tl.arange(0, BLOCK_M)[None, :]
    local_columns = tl.arange(0, BLOCK_N)[:, None]
    columns = column_start + local_columns
    for start in range(begin, end, BLOCK_M):
        rows = start + local_rows
        bias_pointers = bias
        if bias is not None:
            bias_pointers = tile_pointers(bias, start, bias_strides[2], bias_strides[3], local_rows, local_columns)
        mask_pointers = mask
        if mask is not None:
            mask_pointers = tile_pointers(mask, start, mask_strides[2], mask_strides[3], local_rows, local_columns)
        ids = query_ids
        if query_ids is not None:
            ids = tl.load(query_ids + rows * query_id_strides[1], mask=rows < T, other=0)
        queries = load_tile(query, start, T, query_strides[1], query_strides[3], BLOCK_M, D, BLOCK_D, BOUNDARY)
        grads = load_tile(output_grad, start, T, grad_strides[1], grad_strides[3], BLOCK_M, DV, BLOCK_DV, BOUNDARY)
        # +inf: a row beyond T has no weights
        row_max, row_log_sum = load_logsumexp(lse, rows, T)
        row_delta = tl.load(delta + rows, mask=rows < T, other=0.0)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        scores, capped = score_tile(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, ids, key_ids, left, right,
            BOUNDARY,
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
def flash_key_value_grad(
    query, key, value, output_grad, lse, delta, key_grad, value_grad, bias, mask, query_ids, key_ids, seed,
    query_strides, key_strides, value_strides, grad_strides, key_grad_strides, value_grad_strides, bias_strides,
    mask_strides, query_id_strides, key_id_strides, H, GROUP, T, S, left, right, scale, cap, softmax_scale, threshold,
    keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """One program per block of BLOCK_N keys of one key/value head: key_grad (B, S, K, D), value_grad (B, S, K, DV)."""
    blocks = tl.cdiv(S, BLOCK_N)
    # with a causal mask the first keys have the most queries: they start first
    column_start = tl.program_id(0) % blocks * BLOCK_N
    kv_heads = H // GROUP
    b = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) // blocks % kv_heads
    key += b * key_strides[0] + kv_head * key_strides[2]
    value += b * value_strides[0] + kv_head * value_strides[2]
    key_grad += b * key_grad_strides[0] + kv_head * key_grad_strides[2]
    value_grad += b * value_grad_strides[0] + kv_head * value_grad_strides[2]
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

    # from the keys' point of view the band is reversed
    first = column_start - (S - T)
    last = tl.minimum(column_start + BLOCK_N, S) - 1 - (S - T)
    limits = band_limits(first, last, right, left, T, BLOCK_M)
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
        for part in tl.static_range(3):
            if part != 0 or right is not None:
                key_sum, value_sum = _fold_queries(
                    key_sum, value_sum, keys, values, column_start, limits[part], limits[part + 1], q, grad, head_lse,
                    head_delta, query_strides, grad_strides, head_bias, bias_strides, head_mask, mask_strides,
                    query_ids, query_id_strides, column_ids, seed, threshold, keep_scale, head, T, S, left, right,
                    scale, cap,
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, part != 1,
                )  # fmt: skip
    key_sum = key_sum * softmax_scale
    store_tile(key_grad, key_sum, column_start, S, key_grad_strides[1], key_grad_strides[3], BLOCK_N, D, BLOCK_D)
    store_tile(
        value_grad, value_sum, column_start, S, value_grad_strides[1], value_grad_strides[3], BLOCK_N, DV, BLOCK_DV
    )
