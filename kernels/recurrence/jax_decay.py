"""decay.py in jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Decay(NamedTuple):
    """See `decay.Decay`."""

    between: jax.Array
    before: jax.Array
    after: jax.Array
    whole: jax.Array


def of_chunk(log: jax.Array, number: jax.Array | None, carried: jax.Array | None) -> Decay:
    """log (..., L) float32, number (..., L) each token's document, carried (...) that of the state before, or None."""
    log = jnp.maximum(log, -128.0)  # exp(-128) is 0 in float32
    between = sums_between(log)
    after = jnp.exp(between[..., -1, :])
    before = jnp.exp(between[..., :, 0] + log[..., :1])
    index = jnp.arange(log.shape[-1])
    seen = index[:, None] >= index
    if number is not None and carried is not None:
        seen = seen & (number[..., :, None] == number[..., None, :])
        before = jnp.where(number == carried[..., None], before, 0.0)
        after = jnp.where(number == number[..., -1:], after, 0.0)
    return Decay(jnp.exp(jnp.where(seen, between, -jnp.inf)), before, after, before[..., -1])


@jax.custom_vjp
def sums_between(log: jax.Array) -> jax.Array:
    """(..., L) -> (..., L, L): the sum over tokens j+1..i, as a difference of running sums.

    Each running sum is kept as a multiple of 1/256, whose sums are exact, plus a small remainder: TPUs have no float64.
    The gradient adds up the pairs around each token, without differences.
    """
    coarse = jnp.floor(log * 256.0) / 256.0
    exact, rest = jnp.cumsum(coarse, -1), jnp.cumsum(log - coarse, -1)
    return (exact[..., :, None] - exact[..., None, :]) + (rest[..., :, None] - rest[..., None, :])


def _sums_between_forward(log: jax.Array) -> tuple[jax.Array, None]:
    return sums_between(log), None


def _sums_between_backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
    """grad is zero above the diagonal, which is masked."""
    below = jnp.flip(jnp.cumsum(jnp.flip(grad, -2), -2), -2)
    return (jnp.tril(below, -1).sum(-1),)


sums_between.defvjp(_sums_between_forward, _sums_between_backward)


def scan_chunks(
    step: Callable[..., Any], state: jax.Array, tensors: tuple[jax.Array, ...], number: jax.Array | None, length: int
) -> tuple[jax.Array, jax.Array]:
    """`step(state, tensors of a chunk, numbers, carried) -> state, outputs` over chunks of `length` tokens.

    tensors (B, T, ...), padded with zeros, number (B, T) with its last; outputs (B, length, ...) -> (B, T, ...), the
    last state. The backward keeps one state per chunk and recomputes the chunks.
    """
    tokens = tensors[0].shape[1]
    padding = -tokens % length

    def cut(x: jax.Array, mode: str = "constant") -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return padded.reshape(x.shape[0], -1, length, *x.shape[2:]).swapaxes(0, 1)

    numbers = None if number is None else cut(number, "edge")
    carried = None if numbers is None else jnp.concatenate([jnp.zeros_like(numbers[:1, :, 0]), numbers[:-1, :, -1]])

    @jax.checkpoint
    def body(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        return step(state, *chunk)

    state, outputs = jax.lax.scan(body, state, (tuple(cut(x) for x in tensors), numbers, carried))
    outputs = outputs.swapaxes(0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :tokens], state
