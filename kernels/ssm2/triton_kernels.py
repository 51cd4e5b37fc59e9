"""The scan of Mamba-2 in Triton: chunks in order, the state in registers between them."""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.recurrence.triton_decay import decays


@triton.jit
def ssm2_forward(
    x, step, A, B, C, state, number, output, last, x_strides, B_strides, C_strides, T, H, SHARED,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_P channels of a head. x (B, T, H, P), B, C (B, T, G, N); step (B, T, H), state (B, H, P,
    N), number (B, T), output and last contiguous."""
    blocks = tl.cdiv(P, BLOCK_P)
    head = tl.program_id(0) // blocks
    b = (head // H).to(tl.int64)
    h = head % H
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    x += b * x_strides[0] + h * x_strides[2]
    B += b * B_strides[0] + h // SHARED * B_strides[2]
    C += b * C_strides[0] + h // SHARED * C_strides[2]
    step += b * T * H + h
    at_state = (head.to(tl.int64) * P + p[:, None]) * N + n[None, :]
    in_state = (p < P)[:, None] & (n < N)[None, :]
    current = tl.load(state + at_state, mask=in_state, other=0.0)
    rate = tl.load(A + h).to(tl.float32)
    for start in range(0, T, L):
        t = start + tl.arange(0, L)
        inside = t < T
        steps = tl.load(step + t * H, mask=inside, other=0.0)
        numbers = number
        carried = 0
        if number is not None:
            numbers = tl.load(number + b * T + tl.minimum(t, T - 1))
            carried = tl.load(number + b * T + tl.maximum(start - 1, 0))
            carried = tl.where(start > 0, carried, 0)
        between, before, after, whole = decays(steps * rate, numbers, carried)
        rows = t.to(tl.int64)[:, None]
        in_states = inside[:, None] & (n < N)[None, :]
        keys = tl.load(B + rows * B_strides[1] + n[None, :] * B_strides[3], mask=in_states, other=0.0).to(tl.float32)
        queries = tl.load(C + rows * C_strides[1] + n[None, :] * C_strides[3], mask=in_states, other=0.0)
        queries = queries.to(tl.float32)
        in_tokens = inside[:, None] & (p < P)[None, :]
        given = tl.load(x + rows * x_strides[1] + p[None, :] * x_strides[3], mask=in_tokens, other=0.0)
        given = given.to(tl.float32) * steps[:, None]
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(queries, tl.trans(current), input_precision=PRECISION) * before[:, None]
        result = tl.dot(scores, given, result, input_precision=PRECISION)
        at_output = ((b * T + rows) * H + h) * P + p[None, :]
        tl.store(output + at_output, result.to(output.dtype.element_ty), mask=in_tokens)
        current = tl.dot(tl.trans(given * after[:, None]), keys, current * whole, input_precision=PRECISION)
    tl.store(last + at_state, current, mask=in_state)
