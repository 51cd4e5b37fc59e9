"""BERT's encoder in plain jax, on the parameter tree that Hugging Face's FlaxBertModel had.

After "BERT: Pre-training of Deep Bidirectional Transformers", Devlin et al. 2018. B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]


def bert(
    params: Params, input_ids: jax.Array, token_type_ids: jax.Array, mask: jax.Array, *, num_heads: int, epsilon: float
) -> jax.Array:
    """(B, T) token ids, segment ids and mask (1 is a real token) -> last hidden state (B, T, D) float32."""
    hidden = embed(params["embeddings"], input_ids, token_type_ids, epsilon)
    layers = params["encoder"]["layer"]
    for index in range(len(layers)):
        hidden = layer(layers[str(index)], hidden, mask, num_heads, epsilon)
    return hidden


def embed(params: Params, input_ids: jax.Array, token_type_ids: jax.Array, epsilon: float) -> jax.Array:
    words = params["word_embeddings"]["embedding"][input_ids]
    positions = params["position_embeddings"]["embedding"][: input_ids.shape[1]]
    segments = params["token_type_embeddings"]["embedding"][token_type_ids]
    return layer_norm(params["LayerNorm"], words + positions + segments, epsilon)


def layer(params: Params, hidden: jax.Array, mask: jax.Array, num_heads: int, epsilon: float) -> jax.Array:
    """Attention, then the feed-forward network, each added to its input and normalized after."""
    attention = params["attention"]
    mixed = dense(attention["output"]["dense"], attend(attention["self"], hidden, mask, num_heads))
    hidden = layer_norm(attention["output"]["LayerNorm"], hidden + mixed, epsilon)
    inner = jax.nn.gelu(dense(params["intermediate"]["dense"], hidden), approximate=False)
    return layer_norm(params["output"]["LayerNorm"], hidden + dense(params["output"]["dense"], inner), epsilon)


def attend(params: Params, hidden: jax.Array, mask: jax.Array, num_heads: int) -> jax.Array:
    """(B, T, D) -> (B, T, D): every token attends to the real ones."""
    batch, tokens, size = hidden.shape
    query, key, value = (
        dense(params[name], hidden).reshape(batch, tokens, num_heads, size // num_heads)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / jnp.sqrt(size // num_heads)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None, :] == 1, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value).reshape(batch, tokens, size)


def dense(params: Params, x: jax.Array) -> jax.Array:
    result: jax.Array = x @ params["kernel"] + params["bias"]
    return result


def layer_norm(params: Params, x: jax.Array, epsilon: float) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    result: jax.Array = (x - mean) / jnp.sqrt(variance + epsilon) * params["scale"] + params["bias"]
    return result
