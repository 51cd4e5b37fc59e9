"""The kernel of rotary: one program per token, which rotates the heads of its query and key by one row of cos and
sin."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(first, second, cos, cos_above, sin, sin_above, BACK: tl.constexpr):
    """The rotated pairs or, with BACK, their gradients rotated back."""
    if BACK:
        return first * cos + second * sin_above, second * cos_above - first * sin
    else:
        return first * cos - second * sin, second * cos_above + first * sin_above


@triton.jit
def _heads(
    x, output, head_stride, cos, cos_above, sin, sin_above, HEADS, D, HALF,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotates x (HEADS, D), whose heads are head_stride apart, into output, contiguous."""
    for start in range(0, HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)[:, None]
        source, target = x + heads * head_stride, output + heads * D
        if INTERLEAVED:
            columns = tl.arange(0, 2 * BLOCK_D)[None, :]
            inside = (heads < HEADS) & (columns < 2 * HALF)
            pairs = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_D, 2)))
            even, odd = _turn(even, odd, cos, cos_above, sin, sin_above, BACK)
            turned = tl.reshape(tl.join(even, odd), (BLOCK_H, 2 * BLOCK_D))
            tl.store(target + columns, turned.to(output.dtype.element_ty), mask=inside)
        else:
            columns = tl.arange(0, BLOCK_D)[None, :]
            inside = (heads < HEADS) & (columns < HALF)
            first = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + columns, mask=inside, other=0.0).to(tl.float32)
            first, second = _turn(first, second, cos, cos_above, sin, sin_above, BACK)
            tl.store(target + columns, first.to(output.dtype.element_ty), mask=inside)
            tl.store(target + HALF + columns, second.to(output.dtype.element_ty), mask=inside)
        if BLOCK_REST:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            inside = (heads < HEADS) & (rest < D)
            tl.store(target + rest, tl.load(source + rest, mask=inside), mask=inside)


@triton.jit
def rotary_turn(
    query, key, query_output, key_output, cos, sin,
    query_batch_stride, query_token_stride, query_head_stride, key_batch_stride, key_token_stride, key_head_stride,
    cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride,
    T, H, K, D, HALF,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Fills query_output (B, T, H, D) and key_output (B, T, K, D), contiguous. If interleaved, the second halves of cos
    and sin are not read: both features of a pair use its entry of the first.
    """
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = columns < HALF
    cos += b * cos_batch_stride + t * cos_token_stride
    sin += b * sin_batch_stride + t * sin_token_stride
    c = tl.load(cos + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + columns, mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED:
        c_above, s_above = c, s
    else:
        c_above = tl.load(cos + HALF + columns, mask=inside, other=0.0).to(tl.float32)
        s_above = tl.load(sin + HALF + columns, mask=inside, other=0.0).to(tl.float32)
    _heads(
        query + b * query_batch_stride + t * query_token_stride, query_output + token * H * D, query_head_stride,
        c, c_above, s, s_above, H, D, HALF, INTERLEAVED, BACK, BLOCK_H, BLOCK_D, BLOCK_REST,
    )  # fmt: skip
    _heads(
        key + b * key_batch_stride + t * key_token_stride, key_output + token * K * D, key_head_stride,
        c, c_above, s, s_above, K, D, HALF, INTERLEAVED, BACK, BLOCK_K, BLOCK_D, BLOCK_REST,
    )  # fmt: skip
