"""The gated delta rule in jax, chunk by chunk, for TPU: native.py defines it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.kernels.recurrence import jax_decay
from easytorch.kernels.recurrence.jax_gradient import backward_of

CHUNK = 64  # the inverse of a chunk's system costs its length cubed


def gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array,
    number: jax.Array | None = None, *, precision: str = "highest",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """query, key (B, T, H, Dk), normalized and scaled, value (B, T, Hv, Dv), g, beta (B, T, Hv), state (B, Hv, Dk, Dv),
    number (B, T) each token's document in order -> outputs (B, T, Hv, Dv), the last state, all but value and number
    float32. precision: that of the products, as in jax."""
    batch, _, heads, key_width = query.shape
    value_heads, width = value.shape[2:]
    shared = value_heads // heads
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def grouped(x: jax.Array) -> jax.Array:
        """(B, L, Hv, ...) -> (B, H, R, L, ...)."""
        return jnp.moveaxis(x.astype(jnp.float32).reshape(batch, -1, heads, shared, *x.shape[3:]), 1, 3)

    def chunk(state: jax.Array, tensors: tuple[jax.Array, ...], numbers: Any, carried: Any) -> Any:
        queries, keys, *rest = tensors
        values, log, rate = (grouped(x) for x in rest)
        if numbers is not None:
            numbers, carried = numbers[:, None, None], carried[:, None, None]
        decay = jax_decay.of_chunk(log, numbers, carried)
        products = einsum("blhk,bshk->bhls", keys, keys)[:, :, None]
        lower = jnp.tril(products * decay.between * rate[..., None], -1)
        read = einsum("blhk,bhrkv->bhrlv", keys, state) * decay.before[..., None]
        known = rate[..., None] * (values - read)
        changes = einsum("bhrls,bhrsv->bhrlv", unit_triangular_inverse(lower, precision), known)
        scores = einsum("blhk,bshk->bhls", queries, keys)[:, :, None] * decay.between
        outputs = einsum("blhk,bhrkv->bhrlv", queries, state) * decay.before[..., None]
        outputs += einsum("bhrls,bhrsv->bhrlv", scores, changes)
        added = einsum("blhk,bhrlv->bhrkv", keys, changes * decay.after[..., None])
        outputs = jnp.moveaxis(outputs, 3, 1).reshape(batch, -1, value_heads, width)
        return state * decay.whole[..., None, None] + added, outputs.astype(value.dtype)

    state = state.reshape(batch, heads, shared, key_width, width)
    outputs, state = jax_decay.scan_chunks(chunk, state, (query, key, value, g, beta), number, CHUNK)
    return outputs, state.reshape(batch, value_heads, key_width, width)


gated_delta_rule_backward = backward_of(gated_delta_rule, 7)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_triangular_inverse(lower: jax.Array, precision: str) -> jax.Array:
    """(..., L, L), strictly lower triangular -> the inverse of 1 + lower, by diagonal blocks that double in size.

    Two neighbours [[a, 0], [c, b]] have the inverse [[a', 0], [-b' c a', b']]. Powers of `lower` would overflow, and
    XLA's own solver is a call into LAPACK on the CPU, which torch_xla lacks.
    """
    matmul = functools.partial(jnp.matmul, precision=precision)
    length = lower.shape[-1]
    index = jnp.arange(length)
    inverse, size = jnp.eye(length, dtype=lower.dtype), 1
    while size < length:
        block = index // size
        corner = jnp.where((block[:, None] % 2 == 1) & (block[:, None] - 1 == block), lower, 0.0)
        inverse = inverse - (corner if size == 1 else matmul(inverse, matmul(corner, inverse)))
        size *= 2
    return inverse


def _inverse_forward(lower: jax.Array, precision: str) -> tuple[jax.Array, jax.Array]:
    inverse = unit_triangular_inverse(lower, precision)
    return inverse, inverse


def _inverse_backward(precision: str, inverse: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    transposed = inverse.swapaxes(-1, -2)
    matmul = functools.partial(jnp.matmul, precision=precision)
    return (jnp.tril(-matmul(transposed, matmul(grad, transposed)), -1),)


unit_triangular_inverse.defvjp(_inverse_forward, _inverse_backward)
