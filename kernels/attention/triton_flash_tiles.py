"""Device functions that the forward and backward kernels share: tiles of memory, the band of keys, scores, dropout.

Tiles are two-dimensional; a tile of scores is (queries, keys) or (keys, queries), so whatever is added to it is given
as `rows` and `columns` that broadcast. An argument that is None is known when the kernel is compiled and costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.interop.triton_math import LOG2E, tanh
from easytorch.kernels.random import constants

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
HEAD: tl.constexpr = tl.constexpr(constants.HEAD)
ROW: tl.constexpr = tl.constexpr(constants.ROW)
COLUMN: tl.constexpr = tl.constexpr(constants.COLUMN)
MIX_0: tl.constexpr = tl.constexpr(constants.MIX[0])
MIX_1: tl.constexpr = tl.constexpr(constants.MIX[1])


@triton.jit
def tile_pointers(base, start, row_stride, column_stride, rows, columns):
    """Pointers to a tile: its start is computed in 64 bits, offsets inside it fit in 32."""
    return base + tl.cast(start, tl.int64) * row_stride + (rows * row_stride + columns * column_stride)


@triton.jit
def load_tile(
    base, start, length, row_stride, column_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) from row `start` of a (length, WIDTH) matrix, zeros outside; BOUNDARY: rows may lie outside."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = tile_pointers(base, start, row_stride, column_stride, rows, columns)
    if BOUNDARY and WIDTH != COLUMNS:
        return tl.load(pointers, mask=(start + rows < length) & (columns < WIDTH), other=0.0)
    elif BOUNDARY:
        return tl.load(pointers, mask=start + rows < length, other=0.0)
    elif WIDTH != COLUMNS:
        return tl.load(pointers, mask=columns < WIDTH, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    base, tile, start, length, row_stride, column_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what of a (ROWS, COLUMNS) tile lies inside a (length, WIDTH) matrix, in the matrix's dtype."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = tile_pointers(base, start, row_stride, column_stride, rows, columns)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(start + rows < length) & (columns < WIDTH))


@triton.jit
def band_limits(first, last, reach_down, reach_up, length, BLOCK: tl.constexpr):
    """begin, full_begin, full_end, end: what positions first..last see of the `length` positions on the other side.

    Position p sees p - reach_down .. p + reach_up, None meaning unbounded. [begin, end) covers all that any of them
    sees; all of them see all of [full_begin, full_end). begin, full_begin and full_end are multiples of BLOCK unless
    they equal end.
    """
    begin = 0
    full_begin = 0
    end = length
    full_end = length // BLOCK * BLOCK
    if reach_down is not None:
        begin = tl.maximum(first - reach_down, 0) // BLOCK * BLOCK
        full_begin = tl.cdiv(tl.maximum(last - reach_down, 0), BLOCK) * BLOCK
    if reach_up is not None:
        end = tl.minimum(tl.maximum(last + reach_up + 1, 0), length)
        full_end = tl.minimum(tl.maximum(first + reach_up + 1, 0), length) // BLOCK * BLOCK
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def score_tile(
    products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, key_ids, left, right,
    BOUNDARY: tl.constexpr,
):  # fmt: skip
    """(scores, tanh of the soft cap) from products of queries and keys, -inf where not seen.

    Scores are natural with a bias: times log2(e), `torch.finfo(torch.float32).min` would be -inf. Without one they may
    be in units of log2, which saves a product: then scale and cap carry the factor, scale = softmax_scale * log2(e), or
    softmax_scale / softcap and cap = softcap * log2(e). BOUNDARY: the tile may reach beyond S or the band.
    """
    capped = products * scale
    scores = capped
    if cap is not None:
        capped = tanh(capped)
        scores = capped * cap
    if bias_pointers is not None:
        bias = tl.load(bias_pointers, mask=(rows < T) & (columns < S), other=0.0)
        scores += bias.to(tl.float32)
    if mask_pointers is not None:
        seen = tl.load(mask_pointers, mask=(rows < T) & (columns < S), other=0)
        scores = tl.where(seen != 0, scores, float("-inf"))
    if query_ids is not None:
        scores = tl.where(query_ids == key_ids, scores, float("-inf"))
    if BOUNDARY:
        scores = tl.where(columns < S, scores, float("-inf"))
        if left is not None:
            scores = tl.where(columns >= rows + (S - T) - left, scores, float("-inf"))
        if right is not None:
            scores = tl.where(columns <= rows + (S - T) + right, scores, float("-inf"))
    return scores, capped


@triton.jit
def exponential(x, NATURAL: tl.constexpr):
    """The exponential of natural scores, or of those in units of log2."""
    if NATURAL:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def logarithm(x, NATURAL: tl.constexpr):
    """The inverse of `exponential`."""
    x = tl.log2(x)
    if NATURAL:
        x = x * LN2
    return x


@triton.jit
def sink_score(sink, NATURAL: tl.constexpr):
    """The logit of a sink in the units of the scores."""
    sink = sink.to(tl.float32)
    if not NATURAL:
        sink = sink * LOG2E
    return sink


@triton.jit
def load_logsumexp(lse, rows, T):
    """(maximum, log of the sum above it) of rows of lse (2, T); +inf beyond T, where a row has no weights."""
    m_i = tl.load(lse + rows, mask=rows < T, other=0.0)
    return m_i, tl.load(lse + T + rows, mask=rows < T, other=float("inf"))


@triton.jit
def store_logsumexp(lse, rows, T, m_i, l_i, NATURAL: tl.constexpr):
    """Write what `load_logsumexp` reads: 0 and +inf where the sum of exponentials is zero."""
    empty = l_i == 0.0
    tl.store(lse + rows, tl.where(empty, 0.0, m_i), mask=rows < T)
    log_sum = logarithm(tl.where(empty, 1.0, l_i), NATURAL)
    tl.store(lse + T + rows, tl.where(empty, float("inf"), log_sum), mask=rows < T)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * tl.full((), MIX_0, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), MIX_1, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def keep_tile(seed, head, rows, columns, threshold):
    """Boolean tile, True where a weight is kept: the hash of dropout.py. seed: pointer to an int64; head: b * H + h."""
    state = tl.load(seed).to(tl.uint32) ^ (tl.cast(head, tl.uint32) * tl.full((), HEAD, tl.uint32))
    state = _mix(_mix(state) ^ (rows.to(tl.uint32) * tl.full((), ROW, tl.uint32)))
    state = _mix(state ^ (columns.to(tl.uint32) * tl.full((), COLUMN, tl.uint32)))
    return state >= tl.cast(threshold, tl.uint32)
