"""The scan of Mamba-2 in jax, chunk by chunk as matrix products, for TPU: native.py defines it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.kernels.recurrence import jax_decay
from easytorch.kernels.recurrence.jax_gradient import backward_of

CHUNK = 128  # the size of the matrix unit


def ssm2(
    x: jax.Array, step: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array,
    number: jax.Array | None = None, *, precision: str = "highest",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """x (B, T, H, P), step (B, T, H), A (H,), B, C (B, T, G, N), state (B, H, P, N), number (B, T), each token's
    document, ascending -> outputs (B, T, H, P), the last state, all but x, B, C and number float32. precision: that of
    the products, as in jax."""
    batch, _, heads, width = x.shape
    groups, size = B.shape[2:]
    shared = heads // groups
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def chunk(state: jax.Array, tensors: tuple[jax.Array, ...], numbers: Any, carried: Any) -> Any:
        tokens, steps, keys, queries = (tensor.astype(jnp.float32) for tensor in tensors)
        if numbers is not None:
            numbers, carried = numbers[:, None, None], carried[:, None, None]
        log = (steps * A).reshape(batch, -1, groups, shared).transpose(0, 2, 3, 1)
        decay = jax_decay.of_chunk(log, numbers, carried)
        given = (tokens * steps[..., None]).reshape(batch, -1, groups, shared, width)
        scores = einsum("blgn,bsgn->bgls", queries, keys)[:, :, None] * decay.between
        outputs = einsum("bgrls,bsgrp->blgrp", scores, given)
        before, after = (factor.transpose(0, 3, 1, 2)[..., None] for factor in (decay.before, decay.after))
        outputs += einsum("blgn,bgrpn->blgrp", queries, state) * before
        state = state * decay.whole[..., None, None] + einsum("blgrp,blgn->bgrpn", given * after, keys)
        return state, outputs.reshape(batch, -1, heads, width)

    state = state.reshape(batch, groups, shared, width, size)
    outputs, state = jax_decay.scan_chunks(chunk, state, (x, step, B, C), number, CHUNK)
    return outputs, state.reshape(batch, heads, width, size)


ssm2_backward = backward_of(ssm2, 7)
