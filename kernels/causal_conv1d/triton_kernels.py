"""Causal convolution in Triton, forward and backward: one tile of tokens by channels per program.

Position p < 0 is a token of the state (B, C, W-1), whose last is p = -1. number (B, T), or None, is each token's
document in order; the state belongs to document 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(T, CHANNELS, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """The batch, the tile of tokens, the tokens (BLOCK_T, 1) and channels (1, BLOCK_C) of this program."""
    columns = tl.cdiv(CHANNELS, BLOCK_C)
    tile = tl.program_id(0) // columns
    rows = tl.cdiv(T, BLOCK_T)
    c = tl.program_id(0) % columns * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    t = tile % rows * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    return (tile // rows).to(tl.int64), tile, t, c


@triton.jit
def _document(number, b, position, T):
    """The number of the document of each position, 0 before the first token."""
    return tl.load(number + b * T + position, mask=(position >= 0) & (position < T), other=0)


@triton.jit
def _read(x, state, number, x_strides, b, t, c, T, CHANNELS, BACK: tl.constexpr, PAST: tl.constexpr):
    """The tokens BACK before t, float32, zeros where they are another document's."""
    position = t - BACK
    inside = (c < CHANNELS) & (t < T)
    tokens = tl.load(
        x + b * x_strides[0] + position.to(tl.int64) * x_strides[1] + c * x_strides[2],
        mask=inside & (position >= 0), other=0.0,
    ).to(tl.float32)  # fmt: skip
    if state is not None and BACK > 0:
        past = tl.load(state + (b * CHANNELS + c) * PAST + PAST + position, mask=inside & (position < 0), other=0.0)
        tokens += past.to(tl.float32)
    if number is not None:
        tokens = tl.where(_document(number, b, position, T) == _document(number, b, t, T), tokens, 0.0)
    return tokens


@triton.jit
def _sums(x, weight, bias, state, number, x_strides, b, t, c, T, CHANNELS, W: tl.constexpr):
    """The input of the activation."""
    total = tl.zeros((t.shape[0], c.shape[1]), tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        tokens = _read(x, state, number, x_strides, b, t, c, T, CHANNELS, W - 1 - tap, W - 1)
        total += tokens * tl.load(weight + c * W + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
    return total


@triton.jit
def conv_forward(
    x, weight, bias, state, number, output, x_strides, T, CHANNELS, W: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fills output (B, T, CHANNELS), contiguous."""
    b, _, t, c = _tile(T, CHANNELS, BLOCK_T, BLOCK_C)
    total = _sums(x, weight, bias, state, number, x_strides, b, t, c, T, CHANNELS, W)
    if SILU:
        total *= tl.sigmoid(total)
    at = (b * T + t) * CHANNELS + c
    tl.store(output + at, total.to(output.dtype.element_ty), mask=(t < T) & (c < CHANNELS))


@triton.jit
def conv_backward_sums(
    grad, x, weight, bias, state, number, sums_grad, weight_parts, bias_parts, grad_strides, x_strides, T, CHANNELS,
    W: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fills sums_grad (B, T, CHANNELS) float32, and a row for each tile of tokens of weight_parts (tiles, W, CHANNELS)
    and bias_parts (tiles, CHANNELS) float32: no atomics, the same bits every time."""
    b, tile, t, c = _tile(T, CHANNELS, BLOCK_T, BLOCK_C)
    inside = (t < T) & (c < CHANNELS)
    at = b * grad_strides[0] + t.to(tl.int64) * grad_strides[1] + c * grad_strides[2]
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = _sums(x, weight, bias, state, number, x_strides, b, t, c, T, CHANNELS, W)
        gate = tl.sigmoid(total)
        upstream *= gate * (1.0 + total * (1.0 - gate))
    tl.store(sums_grad + (b * T + t) * CHANNELS + c, upstream, mask=inside)
    part = tile.to(tl.int64) * CHANNELS + c
    for tap in tl.static_range(W):
        tokens = _read(x, state, number, x_strides, b, t, c, T, CHANNELS, W - 1 - tap, W - 1)
        row = tile.to(tl.int64) * W + tap
        tl.store(weight_parts + row * CHANNELS + c, tl.sum(upstream * tokens, 0)[None, :], mask=c < CHANNELS)
    tl.store(bias_parts + part, tl.sum(upstream, 0)[None, :], mask=c < CHANNELS)


@triton.jit
def conv_backward_tokens(
    sums_grad, weight, number, x_grad, state_grad, T, CHANNELS, W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fills x_grad (B, T, CHANNELS) and state_grad (B, CHANNELS, W-1), contiguous; tiles cover T + W - 1 positions."""
    b, _, extended, c = _tile(T + W - 1, CHANNELS, BLOCK_T, BLOCK_C)
    position = extended - (W - 1)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(W):
        reader = position + (W - 1 - tap)
        inside = (reader >= 0) & (reader < T) & (c < CHANNELS)
        upstream = tl.load(sums_grad + (b * T + reader) * CHANNELS + c, mask=inside, other=0.0)
        if number is not None:
            upstream = tl.where(_document(number, b, position, T) == _document(number, b, reader, T), upstream, 0.0)
        total += upstream * tl.load(weight + c * W + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
    own = (position >= 0) & (position < T) & (c < CHANNELS)
    tl.store(x_grad + (b * T + position) * CHANNELS + c, total.to(x_grad.dtype.element_ty), mask=own)
    if W > 1:
        past = (position < 0) & (c < CHANNELS)
        tl.store(state_grad + (b * CHANNELS + c) * (W - 1) + extended, total, mask=past)
