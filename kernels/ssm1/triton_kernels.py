"""The selective scan in Triton: token by token, the state in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ssm1_forward(
    step, x, A, B, C, state, first, output, last, kept, T, CHANNELS, N, BATCH, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_C channels of a sequence; all contiguous: step, x, output (B, T, CHANNELS), A (N,
    CHANNELS), B, C (B, T, N), state, last (B, N, CHANNELS), first (B, T) bytes, kept (blocks, B, N, CHANNELS), one in
    BLOCK."""
    columns = tl.cdiv(CHANNELS, BLOCK_C)
    b = (tl.program_id(0) // columns).to(tl.int64)
    c = tl.program_id(0) % columns * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    in_state = (n < N)[:, None] & (c < CHANNELS)[None, :]
    at = n[:, None] * CHANNELS + c[None, :]
    rate = tl.load(A + at, mask=in_state, other=0.0)
    current = tl.load(state + b * N * CHANNELS + at, mask=in_state, other=0.0)
    for start in range(0, T, BLOCK):
        row = tl.cast(start // BLOCK, tl.int64) * BATCH + b
        tl.store(kept + row * N * CHANNELS + at, current, mask=in_state)
        for begin in range(start, tl.minimum(start + BLOCK, T), UNROLL):
            # unrolled, so that the loads of several tokens overlap
            for offset in tl.static_range(UNROLL):
                t = begin + offset
                token = b * T + t
                in_token = (c < CHANNELS) & (t + 0 * c < T)
                size = tl.load(step + token * CHANNELS + c, mask=in_token, other=0.0)
                given = size * tl.load(x + token * CHANNELS + c, mask=in_token, other=0.0)
                in_vector = (n < N) & (t + 0 * n < T)
                column = tl.load(B + token * N + n, mask=in_vector, other=0.0)
                query = tl.load(C + token * N + n, mask=in_vector, other=0.0)
                decay = tl.exp(size[None, :] * rate)
                if first is not None:
                    forget = tl.load(first + b * T + tl.minimum(t, T - 1))
                    decay = tl.where((forget != 0) & (t < T), 0.0, decay)
                current = decay * current + given[None, :] * column[:, None]
                tl.store(output + token * CHANNELS + c, tl.sum(current * query[:, None], 0), mask=in_token)
    tl.store(last + b * N * CHANNELS + at, current, mask=in_state)
