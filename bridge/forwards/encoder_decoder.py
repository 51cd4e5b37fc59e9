"""T5 (transformers 4.57, modeling_flax_t5.py): (B, T) ids of both sides -> the decoder's hidden states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.bridge.forwards.parts import ACTIVATIONS, Params, attend, causal, dense, heads, layers, rms_norm


def t5(p: Params, config: Mapping[str, Any], input_ids: jax.Array, decoder_input_ids: jax.Array) -> jax.Array:
    """Scores are not scaled, and relative positions bias them in self-attention."""
    table = p["shared"]["embedding"]
    states = _stack(p["encoder"], config, table[input_ids], None)
    return _stack(p["decoder"], config, table[decoder_input_ids], states)


def _stack(p: Params, config: Mapping[str, Any], x: jax.Array, states: jax.Array | None) -> jax.Array:
    epsilon, decoder = config["layer_norm_epsilon"], states is not None
    blocks = layers(p["block"])
    table = blocks[0]["layer"]["0"]["SelfAttention"]["relative_attention_bias"]["embedding"]
    bias = _relative_bias(table, x.shape[1], config, decoder)
    mask = causal(x.shape[1]) if decoder else None
    for block in blocks:
        *attentions, last = layers(block["layer"])
        for place, layer in enumerate(attentions):
            normed = rms_norm(layer["layer_norm"]["weight"], x, epsilon)
            if place == 0:
                x = x + _attention(layer["SelfAttention"], config, normed, normed, bias=bias, mask=mask)
            else:
                x = x + _attention(layer["EncDecAttention"], config, normed, states, bias=None, mask=None)
        x = x + _feed_forward(last["DenseReluDense"], config, rms_norm(last["layer_norm"]["weight"], x, epsilon))
    return rms_norm(p["final_layer_norm"]["weight"], x, epsilon)


def _attention(p: Params, config: Mapping[str, Any], x: jax.Array, states: Any, *, bias: Any, mask: Any) -> jax.Array:
    count = config["num_heads"]
    query, key, value = (
        heads(dense(p["q"], x), count),
        heads(dense(p["k"], states), count),
        heads(dense(p["v"], states), count),
    )
    return dense(p["o"], attend(query, key, value, scale=1.0, bias=bias, mask=mask))


def _feed_forward(p: Params, config: Mapping[str, Any], x: jax.Array) -> jax.Array:
    name = config.get("feed_forward_proj", "relu")
    activation = ACTIVATIONS["gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")]
    inner = activation(dense(p["wi_0"], x)) * dense(p["wi_1"], x) if "wi_0" in p else activation(dense(p["wi"], x))
    return dense(p["wo"], inner)


def _relative_bias(table: jax.Array, length: int, config: Mapping[str, Any], decoder: bool) -> jax.Array:
    """(1, H, T, T) from the table (buckets, H): exact near, logarithmic far, halved by direction in the encoder."""
    distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    buckets, furthest = config["relative_attention_num_buckets"], config.get("relative_attention_max_distance", 128)
    start = jnp.zeros_like(distance)
    if decoder:
        distance = -jnp.minimum(distance, 0)
    else:
        buckets //= 2
        start = (distance > 0) * buckets
        distance = jnp.abs(distance)
    exact = buckets // 2
    far = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(furthest / exact) * (buckets - exact)
    far = jnp.minimum(exact + far.astype(jnp.int32), buckets - 1)
    return jnp.moveaxis(table[start + jnp.where(distance < exact, distance, far)], -1, 0)[None]
