"""Decoding attention in Triton: split-K over the cache, and the kernel that combines the splits.

Follows Flash-Decoding, https://pytorch.org/blog/flash-decoding. A program holds up to BLOCK_M query heads that read one
key/value head, as the rows of one matrix, and its share of the keys that the sequence's query sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import band_limits, exponential, load_tile, score_tile, sink_score


@triton.jit
def _fold(
    output, l_i, m_i, query, begin, end, key, value, key_strides, value_strides, bias, bias_strides, mask,
    mask_strides, heads, query_id, key_ids, key_id_strides, S, left, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, NATURAL: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Fold keys [begin, end) into the running (output, l_i, m_i) of the heads; begin is a multiple of BLOCK_N."""
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)[None, :]
        bias_pointers = bias
        if bias is not None:
            bias_pointers = bias + (heads * bias_strides[1])[:, None] + columns * bias_strides[3]
        mask_pointers = mask
        if mask is not None:
            mask_pointers = mask + (heads * mask_strides[1])[:, None] + columns * mask_strides[3]
        ids = key_ids
        if key_ids is not None:
            ids = tl.load(key_ids + columns * key_id_strides[1], mask=columns < S, other=0)
        keys = load_tile(key, start, S, key_strides[1], key_strides[3], BLOCK_N, D, BLOCK_D, BOUNDARY)
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        # one query, row 0 of 1: the rows of the tile are heads
        scores, _ = score_tile(
            products, columns * 0, columns, 1, S, scale, cap, bias_pointers, mask_pointers, query_id, ids, left, None,
            BOUNDARY,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # heads that have seen nothing yet have no maximum: -inf - -inf is NaN
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = exponential(scores - origin[:, None], NATURAL)
        alpha = exponential(m_i - origin, NATURAL)
        l_i = l_i * alpha + tl.sum(weights, 1)
        values = load_tile(value, start, S, value_strides[1], value_strides[3], BLOCK_N, DV, BLOCK_DV, BOUNDARY)
        output = tl.dot(weights.to(values.dtype), values, output * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return output, l_i, m_i


@triton.jit
def decode_split(
    query, key, value, output, lse, bias, mask, query_ids, key_ids, sinks, lengths,
    query_strides, key_strides, value_strides, bias_strides, mask_strides, query_id_strides, key_id_strides,
    H, S, left, scale, cap,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """Writes output (B, H, SPLITS, DV) and lse (B, H, 2, SPLITS): a split's maximum and its sum above that.

    The maximum is in units of the scores, -inf where a split sees nothing; its output is not written then. lse is None
    for SPLITS = 1: the output is final, sinks included.
    """
    head_blocks: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head_block = program % head_blocks  # neighbours read the same keys
    kv_head = program // head_blocks % (H // GROUP)
    split = program // (head_blocks * (H // GROUP)) % SPLITS
    b = (program // (head_blocks * (H // GROUP) * SPLITS)).to(tl.int64)

    local = head_block * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + tl.minimum(local, GROUP - 1)  # rows past the group repeat its last head
    dims = tl.arange(0, BLOCK_D)[None, :]
    query += b * query_strides[0]
    queries = tl.load(
        query + (heads * query_strides[2])[:, None] + dims * query_strides[3],
        mask=(local < GROUP)[:, None] & (dims < D), other=0.0,
    )  # fmt: skip
    key += b * key_strides[0] + kv_head * key_strides[2]
    value += b * value_strides[0] + kv_head * value_strides[2]
    if bias is not None:
        bias += b * bias_strides[0]
    if mask is not None:
        mask += b * mask_strides[0]
    query_id = query_ids
    if query_ids is not None:
        query_id = tl.load(query_ids + b * query_id_strides[0])
        key_ids += b * key_id_strides[0]
    if lengths is not None:
        S = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int32), 0), S)

    # what the query at key S - 1 sees, shared out in whole blocks
    limits = band_limits(S - 1, S - 1, left, None, S, BLOCK_N)
    share = tl.cdiv(tl.cdiv(S - limits[0], BLOCK_N), SPLITS) * BLOCK_N
    first = limits[0] + split * share
    last = first + share
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if SPLITS == 1 and sinks is not None:
        m_i = sink_score(tl.load(sinks + heads), NATURAL)
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    result = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            result, l_i, m_i = _fold(
                result, l_i, m_i, queries, tl.maximum(limits[part], first), tl.minimum(limits[part + 1], last), key,
                value, key_strides, value_strides, bias, bias_strides, mask, mask_strides, heads, query_id, key_ids,
                key_id_strides, S, left, scale, cap, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, NATURAL, part != 1,
            )  # fmt: skip

    empty = l_i == 0.0
    result = result / tl.where(empty, 1.0, l_i)[:, None]
    places = (b * H + heads) * SPLITS + split
    columns = tl.arange(0, BLOCK_DV)[None, :]
    inside = (local < GROUP)[:, None] & (columns < DV)
    if lse is not None:
        maxima = lse + (b * H + heads) * 2 * SPLITS + split
        tl.store(maxima, tl.where(empty, float("-inf"), m_i), mask=local < GROUP)
        tl.store(maxima + SPLITS, l_i, mask=local < GROUP)
        inside = inside & (empty == 0)[:, None]
    tl.store(output + places[:, None] * DV + columns, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def decode_merge(
    partial, lse, output, sinks, H, SPLITS, DV, BLOCK_SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """Fills output (B, H, DV) from partial (B, H, SPLITS, DV) and lse (B, H, 2, SPLITS). One program per head."""
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    maxima = lse + head * 2 * SPLITS + splits
    m_parts = tl.load(maxima, mask=splits < SPLITS, other=float("-inf"))
    l_parts = tl.load(maxima + SPLITS, mask=splits < SPLITS, other=0.0)
    m_i = tl.max(m_parts, 0)
    sink = m_i
    if sinks is not None:
        sink = sink_score(tl.load(sinks + head % H), NATURAL)
        m_i = tl.maximum(m_i, sink)
    origin = tl.where(m_i == float("-inf"), 0.0, m_i)
    weights = l_parts * exponential(m_parts - origin, NATURAL)
    l_i = tl.sum(weights, 0)
    if sinks is not None:
        l_i += exponential(sink - origin, NATURAL)
    weights = weights / tl.where(l_i == 0.0, 1.0, l_i)
    columns = tl.arange(0, BLOCK_DV)
    parts = tl.load(
        partial + (head * SPLITS + splits)[:, None] * DV + columns[None, :],
        mask=(m_parts > float("-inf"))[:, None] & (columns < DV)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], 0)
    tl.store(output + head * DV + columns, result.to(output.dtype.element_ty), mask=columns < DV)
