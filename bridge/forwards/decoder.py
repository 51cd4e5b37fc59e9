"""Llama, Mistral, Gemma and GPT-2 (transformers 4.57, modeling_flax_*.py): (B, T) ids -> the last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.bridge.forwards.parts import (
    ACTIVATIONS,
    Params,
    attend,
    causal,
    dense,
    heads,
    layer_norm,
    layers,
    rms_norm,
)


def llama(p: Params, config: Mapping[str, Any], input_ids: jax.Array) -> jax.Array:
    """Llama, and Mistral while the sequence is shorter than its window."""
    return _rotary_decoder(p, config, input_ids, offset=0.0, embedding_scale=1.0)


def gemma(p: Params, config: Mapping[str, Any], input_ids: jax.Array) -> jax.Array:
    """Norms scale by 1 + weight, and embeddings by the square root of their size."""
    return _rotary_decoder(p, config, input_ids, offset=1.0, embedding_scale=config["hidden_size"] ** 0.5)


def _rotary_decoder(
    p: Params, config: Mapping[str, Any], input_ids: jax.Array, *, offset: float, embedding_scale: float
) -> jax.Array:
    epsilon, count = config["rms_norm_eps"], config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // count
    x = p["embed_tokens"]["embedding"][input_ids] * embedding_scale
    mask, activation = causal(input_ids.shape[1]), ACTIVATIONS[config.get("hidden_activation") or config["hidden_act"]]
    for layer in layers(p["layers"]):
        attention, mlp = layer["self_attn"], layer["mlp"]
        normed = rms_norm(offset + layer["input_layernorm"]["weight"], x, epsilon)
        query, key, value = (_split(dense(attention[f"{name}_proj"], normed), size) for name in "qkv")
        query, key = (_rotate(y, _theta(config)) for y in (query, key))
        x = x + dense(attention["o_proj"], attend(query, key, value, scale=size**-0.5, mask=mask))
        normed = rms_norm(offset + layer["post_attention_layernorm"]["weight"], x, epsilon)
        x = x + dense(mlp["down_proj"], activation(dense(mlp["gate_proj"], normed)) * dense(mlp["up_proj"], normed))
    return rms_norm(offset + p["norm"]["weight"], x, epsilon)


def _theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return rope.get("rope_theta") or config.get("rope_theta") or 10000.0


def _split(x: jax.Array, size: int) -> jax.Array:
    return heads(x, x.shape[-1] // size)


def _rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of (B, T, H, D), the two halves of a head being the pairs."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gpt2(p: Params, config: Mapping[str, Any], input_ids: jax.Array) -> jax.Array:
    """Pre-norm, learned positions, and kernels that are stored (out, in)."""
    epsilon, count = config["layer_norm_epsilon"], config["n_head"]
    x = p["wte"]["embedding"][input_ids] + p["wpe"]["embedding"][jnp.arange(input_ids.shape[1])]
    mask = causal(input_ids.shape[1])
    for layer in layers(p["h"]):
        fused = _conv1d(layer["attn"]["c_attn"], layer_norm(layer["ln_1"], x, epsilon))
        query, key, value = (heads(y, count) for y in jnp.split(fused, 3, axis=-1))
        mixed = attend(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)
        x = x + _conv1d(layer["attn"]["c_proj"], mixed)
        inner = _conv1d(layer["mlp"]["c_fc"], layer_norm(layer["ln_2"], x, epsilon))
        x = x + _conv1d(layer["mlp"]["c_proj"], ACTIVATIONS[config["activation_function"]](inner))
    return layer_norm(p["ln_f"], x, epsilon)


def _conv1d(p: Params, x: jax.Array) -> jax.Array:
    y: jax.Array = jnp.matmul(x, p["kernel"].T, precision="highest") + p["bias"]
    return y
