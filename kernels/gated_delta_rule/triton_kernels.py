"""The gated delta rule in Triton: chunks in order, the state in registers between them."""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.recurrence.triton_decay import decays


@triton.jit
def unit_triangular_inverse(lower, PRECISION: tl.constexpr):
    """(L, L), strictly lower triangular -> the inverse of 1 + lower, by blocks on the diagonal that double in size.

    Two neighbours [[a, 0], [c, b]] have the inverse [[a', 0], [-b' c a', b']]. Powers of `lower` would overflow.
    """
    rows = tl.arange(0, lower.shape[0])[:, None]
    columns = tl.arange(0, lower.shape[0])[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows % 2 == 1) & (rows - 1 == columns), lower, 0.0)
    size = 2
    while size < lower.shape[0]:
        block = rows // size
        corner = tl.where((block % 2 == 1) & (block - 1 == columns // size), lower, 0.0)
        half = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, half, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def delta_forward(
    query, key, value, g, beta, state, number, output, last, query_strides, key_strides, value_strides, T, H, SHARED,
    DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program BLOCK_V columns of a value head; H of them share SHARED to a key. query, key (B, T, H / SHARED, DK),
    value (B, T, H, DV); g, beta (B, T, H), state (B, H, DK, DV), number (B, T), output and last contiguous."""
    blocks = tl.cdiv(DV, BLOCK_V)
    head = tl.program_id(0) // blocks
    b = (head // H).to(tl.int64)
    h = head % H
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    query += b * query_strides[0] + h // SHARED * query_strides[2]
    key += b * key_strides[0] + h // SHARED * key_strides[2]
    value += b * value_strides[0] + h * value_strides[2]
    at_state = (head.to(tl.int64) * DK + k[:, None]) * DV + v[None, :]
    in_state = (k < DK)[:, None] & (v < DV)[None, :]
    current = tl.load(state + at_state, mask=in_state, other=0.0)
    index = tl.arange(0, L)
    for start in range(0, T, L):
        t = start + index
        inside = t < T
        at_scalar = (b * T + t) * H + h
        rate = tl.load(beta + at_scalar, mask=inside, other=0.0).to(tl.float32)
        numbers = number
        carried = 0
        if number is not None:
            numbers = tl.load(number + b * T + tl.minimum(t, T - 1))
            carried = tl.load(number + b * T + tl.maximum(start - 1, 0))
            carried = tl.where(start > 0, carried, 0)
        log = tl.load(g + at_scalar, mask=inside, other=0.0).to(tl.float32)
        between, before, after, whole = decays(log, numbers, carried)
        rows = t.to(tl.int64)[:, None]
        in_keys = inside[:, None] & (k < DK)[None, :]
        keys = tl.load(key + rows * key_strides[1] + k[None, :] * key_strides[3], mask=in_keys, other=0.0)
        keys = keys.to(tl.float32)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        lower = tl.where(index[:, None] > index[None, :], products * between * rate[:, None], 0.0)
        inverse = unit_triangular_inverse(lower, PRECISION)
        in_values = inside[:, None] & (v < DV)[None, :]
        values = tl.load(value + rows * value_strides[1] + v[None, :] * value_strides[3], mask=in_values, other=0.0)
        read = tl.dot(keys, current, input_precision=PRECISION) * before[:, None]
        known = rate[:, None] * (values.to(tl.float32) - read)
        changes = tl.dot(inverse, known, input_precision=PRECISION)
        queries = tl.load(query + rows * query_strides[1] + k[None, :] * query_strides[3], mask=in_keys, other=0.0)
        queries = queries.to(tl.float32)
        result = tl.dot(queries, current, input_precision=PRECISION) * before[:, None]
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(scores, changes, result, input_precision=PRECISION)
        tl.store(output + at_scalar[:, None] * DV + v[None, :], result.to(output.dtype.element_ty), mask=in_values)
        left = changes * after[:, None]
        current = tl.dot(tl.trans(keys), left, current * whole, input_precision=PRECISION)
    tl.store(last + at_state, current, mask=in_state)
