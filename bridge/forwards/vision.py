"""ViT (transformers 4.57, modeling_flax_vit.py): (B, C, H, W) pixels -> hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from easytorch.bridge.forwards.parts import ACTIVATIONS, Params, attend, dense, heads, layer_norm, layers


def vit(p: Params, config: Mapping[str, Any], pixel_values: jax.Array) -> jax.Array:
    """Pre-norm layers over the class token and the patches; a norm at the end."""
    epsilon, count = config["layer_norm_eps"], config["num_attention_heads"]
    embeddings, size = p["embeddings"], config["patch_size"]
    projection = embeddings["patch_embeddings"]["projection"]
    patches = jax.lax.conv_general_dilated(
        jnp.moveaxis(pixel_values, 1, -1),
        projection["kernel"],
        (size, size),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )
    patches = patches.reshape(len(patches), -1, patches.shape[-1]) + projection["bias"]
    first = jnp.broadcast_to(embeddings["cls_token"], (len(patches), 1, patches.shape[-1]))
    x = jnp.concatenate([first, patches], axis=1) + embeddings["position_embeddings"]
    for layer in layers(p["encoder"]["layer"]):
        attention, normed = layer["attention"], layer_norm(layer["layernorm_before"], x, epsilon)
        query, key, value = (heads(dense(attention["attention"][n], normed), count) for n in ("query", "key", "value"))
        x = x + dense(attention["output"]["dense"], attend(query, key, value, scale=query.shape[-1] ** -0.5))
        inner = dense(layer["intermediate"]["dense"], layer_norm(layer["layernorm_after"], x, epsilon))
        x = x + dense(layer["output"]["dense"], ACTIVATIONS[config["hidden_act"]](inner))
    return layer_norm(p["layernorm"], x, epsilon)
