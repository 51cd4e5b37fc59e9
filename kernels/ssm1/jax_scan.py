"""The selective scan in jax, token by token, for TPU: native.py defines it.

An associative scan would write every state of a chunk to memory a dozen times; token by token they stay in registers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from easytorch.kernels.recurrence import jax_decay
from easytorch.kernels.recurrence.jax_gradient import backward_of

CHUNK = 64  # tokens whose states the backward recomputes at once
UNROLL = 8


def ssm1(
    step: jax.Array, x: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """step, x (B, T, C), A (N, C), B, C (B, T, N), state (B, N, C), first (B, T) bool, where the state is reset ->
    outputs (B, T, C), the last state; float32."""

    def token(state: jax.Array, tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        size, tokens, keys, queries, *forgotten = tensors
        decay = jnp.exp(size[:, None] * A)
        if forgotten:
            decay = jnp.where(forgotten[0][:, None, None], 0.0, decay)
        state = decay * state + (size * tokens)[:, None] * keys[..., None]
        return state, (state * queries[..., None]).sum(1)

    def chunk(state: jax.Array, tensors: tuple[jax.Array, ...], numbers: Any, carried: Any) -> Any:
        state, outputs = jax.lax.scan(token, state, tuple(x.swapaxes(0, 1) for x in tensors), unroll=UNROLL)
        return state, outputs.swapaxes(0, 1)

    tensors = (step, x, B, C) if first is None else (step, x, B, C, first)
    return jax_decay.scan_chunks(chunk, state, tensors, None, CHUNK)


ssm1_backward = backward_of(ssm1, 7)
