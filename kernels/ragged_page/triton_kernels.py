"""Attention over pages in Triton: online softmax over the keys that a block table points to.

A program computes HEADS query heads that share one key/value head, for BLOCK_Q tokens of one sequence, folded into
BLOCK_M rows. The keys of a sequence may be split among programs (split-K, https://pytorch.org/blog/flash-decoding);
`merge_splits` then combines their results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import band_limits, score_tile
from easytorch.kernels.interop.triton_math import LOG2E


@triton.jit
def _gather(
    pool, places, strides, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, seen, BOUNDARY: tl.constexpr
):  # fmt: skip
    """(BLOCK_N, BLOCK_WIDTH) rows of a pool at `places` = (page, slot); zeros where `seen` is False and past WIDTH."""
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    pages, slots = places
    pointers = pool + (pages * strides[0] + slots * strides[1])[:, None] + columns * strides[3]
    if BOUNDARY and WIDTH != BLOCK_WIDTH:
        return tl.load(pointers, mask=seen[:, None] & (columns < WIDTH), other=0.0)
    elif BOUNDARY:
        return tl.load(pointers, mask=seen[:, None], other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        return tl.load(pointers, mask=columns < WIDTH, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _fold(
    output, l_i, m_i, query, tail_query, begin, end, key, tail_key, value, key_strides, tail_key_strides,
    value_strides, table, last_page, rows, T, S, left, right, scale, cap,
    PAGE: tl.constexpr, D: tl.constexpr, DT: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DT: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Fold keys [begin, end) of a sequence into the running (output, l_i, m_i) of BLOCK_M rows."""
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < S
        slots = columns
        if PAGE == 0:  # all keys of a sequence are in one page, of any size
            pages = tl.load(table).to(tl.int64)
        elif BOUNDARY:
            pages = tl.load(table + columns // PAGE, mask=inside, other=0).to(tl.int64)
            slots = columns % PAGE
        else:
            pages = tl.load(table + columns // PAGE).to(tl.int64)
            slots = columns % PAGE
        places = (tl.minimum(tl.maximum(pages, 0), last_page), slots)
        keys = _gather(key, places, key_strides, D, BLOCK_D, inside, BOUNDARY)
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if tail_key is not None:
            tails = _gather(tail_key, places, tail_key_strides, DT, BLOCK_DT, inside, BOUNDARY)
            products = tl.dot(tail_query, tl.trans(tails), products, input_precision=PRECISION)
        scores, _ = score_tile(
            products, rows[:, None], columns[None, :], T, S, scale, cap, None, None, None, None, left, right, BOUNDARY
        )
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        origin = m_new
        if BOUNDARY:
            # a row without keys so far has maximum -inf, and -inf - -inf is NaN
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - origin[:, None])
        alpha = tl.exp2(m_i - origin)
        l_i = l_i * alpha + tl.sum(weights, 1)
        values = keys  # the values may be the leading features of the keys
        if value is not None:
            values = _gather(value, places, value_strides, DV, BLOCK_DV, inside, BOUNDARY)
        output = tl.dot(weights.to(values.dtype), values, output * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return output, l_i, m_i


@triton.jit
def ragged_forward(
    query, tail_query, key, tail_key, value, output, lse, sinks, context_lens, block_tables, query_start_loc, num_seqs,
    query_strides, tail_query_strides, key_strides, tail_key_strides, value_strides, table_stride, capacity, last_page,
    B, N, H, left, right, scale, cap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DT: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DT: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention over `capacity` keys of a sequence at most, in the pages up to `last_page`, whatever the tables hold.

    Writes output (N, H, DV); with an lse (N, H, 2, SPLITS) float32 both are partial, output (N, H, SPLITS, DV).

    lse: a row's largest score among a split's keys, times log2(e), -inf where it attends to none of them (whose output
    is then not written), and the sum of their exponentials above it.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head_block = program % head_blocks  # neighbouring programs read the same keys
    kv_head = program // head_blocks % (H // GROUP)
    split = program // (head_blocks * (H // GROUP)) % SPLITS
    block = program // (head_blocks * (H // GROUP) * SPLITS)

    # Sequence b has the blocks from start[b] // BLOCK_Q + b on, at least one; after the last sequence comes one of the
    # rows that none owns, without keys. The sequence of this block is the last that starts at or before it.
    count = block * 0 + B
    if num_seqs is not None:
        count = tl.minimum(tl.maximum(tl.load(num_seqs).to(tl.int32), 0), B)
    low = block * 0
    high = count
    while low < high:
        middle = (low + high + 1) // 2
        starts_before = tl.load(query_start_loc + middle).to(tl.int32) // BLOCK_Q + middle <= block
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    owned = low < count
    first_row = tl.load(query_start_loc + low).to(tl.int32)
    T = tl.minimum(tl.load(query_start_loc + low + 1, mask=owned, other=N).to(tl.int32), N) - first_row
    S = tl.minimum(tl.maximum(tl.load(context_lens + low, mask=owned, other=0).to(tl.int32), 0), capacity)
    row_start = (block - (first_row // BLOCK_Q + low)) * BLOCK_Q
    if (row_start >= T) | (row_start < 0) | (first_row < 0):
        return

    local = tl.arange(0, BLOCK_M)
    rows = row_start + local // HEADS
    group_head = head_block * HEADS + local % HEADS
    inside = (local // HEADS < BLOCK_Q) & (rows < T) & (group_head < GROUP)
    tokens = (first_row + rows).to(tl.int64)
    heads = kv_head * GROUP + group_head
    dims = tl.arange(0, BLOCK_D)[None, :]
    queries = tl.load(
        query + (tokens * query_strides[0] + heads * query_strides[1])[:, None] + dims * query_strides[2],
        mask=inside[:, None] & (dims < D), other=0.0,
    )  # fmt: skip
    key += kv_head * key_strides[2]
    tail_queries = queries
    if tail_query is not None:
        tail_dims = tl.arange(0, BLOCK_DT)[None, :]
        places = (tokens * tail_query_strides[0] + heads * tail_query_strides[1])[:, None]
        tail_queries = tl.load(
            tail_query + places + tail_dims * tail_query_strides[2], mask=inside[:, None] & (tail_dims < DT), other=0.0
        )
        tail_key += kv_head * tail_key_strides[2]
    if value is not None:
        value += kv_head * value_strides[2]

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, float("-inf"))
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    result = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    first = row_start + (S - T)
    last = tl.minimum(row_start + BLOCK_Q, T) - 1 + (S - T)
    limits = band_limits(first, last, left, right, S, BLOCK_N)
    own = tl.cdiv(tl.cdiv(tl.maximum(limits[3] - limits[0], 0), BLOCK_N), SPLITS) * BLOCK_N
    begin = limits[0] + split * own
    end = tl.maximum(tl.minimum(limits[3], begin + own), begin)
    table = block_tables + low.to(tl.int64) * table_stride
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            result, l_i, m_i = _fold(
                result, l_i, m_i, queries, tail_queries, tl.minimum(tl.maximum(limits[part], begin), end),
                tl.minimum(tl.maximum(limits[part + 1], begin), end), key, tail_key, value, key_strides,
                tail_key_strides, value_strides, table, last_page, rows, T, S, left, right, scale, cap,
                PAGE, D, DT, DV, BLOCK_N, BLOCK_D, BLOCK_DT, BLOCK_DV, PRECISION, part != 1,
            )  # fmt: skip

    empty = l_i == 0.0
    result = result / tl.where(empty, 1.0, l_i)[:, None]
    value_dims = tl.arange(0, BLOCK_DV)[None, :]
    places = tokens * H + heads
    written = inside
    if lse is not None:
        maxima = lse + places * 2 * SPLITS + split
        tl.store(maxima, tl.where(empty, float("-inf"), m_i), mask=inside)
        tl.store(maxima + SPLITS, l_i, mask=inside)
        places = places * SPLITS + split
        written = inside & (l_i != 0.0)
    tl.store(
        output + places[:, None] * DV + value_dims, result.to(output.dtype.element_ty),
        mask=written[:, None] & (value_dims < DV),
    )  # fmt: skip


@triton.jit
def merge_splits(
    partial, lse, output, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """partial (rows, SPLITS, DV), lse (rows, 2, SPLITS) of `ragged_forward` -> output (rows, DV), a program a row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_DV)[None, :]
    m_parts = tl.load(lse + row * 2 * SPLITS + splits)
    l_parts = tl.load(lse + row * 2 * SPLITS + SPLITS + splits)
    m_i = tl.max(m_parts, 0)
    weights = l_parts * tl.exp2(m_parts - tl.where(m_i == float("-inf"), 0.0, m_i))
    parts = tl.load(
        partial + (row * SPLITS + splits)[:, None] * DV + dims,
        mask=(m_parts > float("-inf"))[:, None] & (dims < DV), other=0.0,
    )  # fmt: skip
    l_i = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(l_i == 0.0, 1.0, l_i)
    columns = tl.arange(0, BLOCK_DV)
    tl.store(output + row * DV + columns, result.to(output.dtype.element_ty), mask=columns < DV)
