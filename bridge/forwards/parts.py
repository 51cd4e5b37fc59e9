"""Building blocks of the forward passes. Arrays are jax's, in float32; `p` is the subtree of a module, of the base
model in a whole forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def dense(p: Params, x: jax.Array) -> jax.Array:
    """x (..., in) by the kernel (in, out), and the bias if there is one."""
    y = jnp.matmul(x, p["kernel"], precision="highest")
    return y + p["bias"] if "bias" in p else y


def layer_norm(p: Params, x: jax.Array, epsilon: float) -> jax.Array:
    """Over the last axis."""
    centered = x - x.mean(-1, keepdims=True)
    y: jax.Array = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + epsilon) * p["scale"]
    return y + p["bias"] if "bias" in p else y


def rms_norm(scale: jax.Array, x: jax.Array, epsilon: float) -> jax.Array:
    """Over the last axis, without a mean."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * scale


def heads(x: jax.Array, count: int) -> jax.Array:
    """(B, T, count * D) -> (B, T, count, D)."""
    return x.reshape(*x.shape[:-1], count, -1)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """query (B, T, H, D), key and value (B, S, K, D), H a multiple of K -> (B, T, H * D).

    mask: boolean, True attends, and bias: added to the scores, both broadcastable to (B, H, T, S).
    """
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") * scale
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest").reshape(*query.shape[:2], -1)


def causal(length: int) -> jax.Array:
    """(1, 1, T, T): a token attends itself and what came before."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def layers(p: Params) -> list[Params]:
    """The layers of `{"0": ..., "1": ...}` in their order."""
    return [p[str(number)] for number in range(len(p))]
