"""BERT and RoBERTa (transformers 4.57, modeling_flax_bert.py and _roberta.py): (B, T) ids -> hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.bridge.forwards.parts import ACTIVATIONS, Params, attend, dense, heads, layer_norm, layers


def bert(p: Params, config: Mapping[str, Any], input_ids: jax.Array) -> jax.Array:
    """Positions count from zero."""
    return _encoder(p, config, input_ids, jnp.arange(input_ids.shape[1])[None])


def roberta(p: Params, config: Mapping[str, Any], input_ids: jax.Array) -> jax.Array:
    """Positions count from the one after the padding's, whose tokens keep it."""
    padding = config["pad_token_id"]
    real = input_ids != padding
    return _encoder(p, config, input_ids, jnp.cumsum(real, axis=1) * real + padding)


def _encoder(p: Params, config: Mapping[str, Any], input_ids: jax.Array, positions: jax.Array) -> jax.Array:
    epsilon, tables = config["layer_norm_eps"], p["embeddings"]
    x = tables["word_embeddings"]["embedding"][input_ids] + tables["position_embeddings"]["embedding"][positions]
    x = layer_norm(tables["LayerNorm"], x + tables["token_type_embeddings"]["embedding"][0], epsilon)
    count = config["num_attention_heads"]
    for layer in layers(p["encoder"]["layer"]):
        attention = layer["attention"]
        query, key, value = (heads(dense(attention["self"][name], x), count) for name in ("query", "key", "value"))
        mixed = dense(attention["output"]["dense"], attend(query, key, value, scale=query.shape[-1] ** -0.5))
        x = layer_norm(attention["output"]["LayerNorm"], x + mixed, epsilon)
        inner = ACTIVATIONS[config["hidden_act"]](dense(layer["intermediate"]["dense"], x))
        x = layer_norm(layer["output"]["LayerNorm"], x + dense(layer["output"]["dense"], inner), epsilon)
    return x
