"""Which models the engine carries: those whose every layer attends to the pages of a cache itself."""

from __future__ import annotations

from typing import Any

from easytorch.layers.config import attn_implementation
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.masks import FULL, SLIDING
from easytorch.layers.rotary import RotaryTables


def refusal(model: Any) -> str | None:
    """Why `model` cannot be run over pages of many requests; None: it can."""
    name = type(model).__name__
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        return f"{name} is no causal language model; load one with AutoModelForCausalLM"
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder, whose keys lie in no pages; use model.generate"
    backbone = backbone_of(model)
    if backbone is None:
        return (
            f"{name} is not a native decoder, and attends to no pages; docs/models.md lists the native ones, and "
            "model.generate_batch is transformers' own engine"
        )
    if others := sorted(set(backbone.layer_types) - {FULL, SLIDING}):
        return f"{name} has layers of {', '.join(others)}, whose states lie in no pages; use model.generate"
    layers = [one for one in backbone.modules() if getattr(one, "layer_idx", None) is not None]
    attentions = []
    for layer in layers:
        if not isinstance(layer, GroupedAttention) or type(layer).forward is not GroupedAttention.forward:
            return f"{name} has layers of {type(layer).__name__}, which attend to no pages; use model.generate"
        attentions.append(layer)
    if len(layers) != len(backbone.layer_types):
        return f"{name} has {len(layers)} attentions in {len(backbone.layer_types)} layers; use model.generate"
    if model.training:
        return f"{name} is in training mode, where dropout applies: call model.eval()"
    implementation = attn_implementation(model.config)
    if any(attention.features_of_pages(implementation, {}) is None for attention in attentions):
        return (
            f"{name} was loaded with attn_implementation={implementation!r}, which attends to no pages, or returns "
            'attention weights; load it with attn_implementation="easytorch"'
        )
    return None


def backbone_of(model: Any) -> DecoderBackbone | None:
    """The native decoder of a model of text, which OPT's base model holds; None where there is none."""
    base = model.base_model
    return next((one for one in (base, getattr(base, "decoder", None)) if isinstance(one, DecoderBackbone)), None)


def longest_row(model: Any) -> tuple[int | None, str]:
    """How many tokens a request may have, None for any number; and why."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    parts = rope.values() if all(isinstance(one, dict) for one in rope.values()) else [rope]
    backbone = backbone_of(model)
    if backbone is not None and isinstance(backbone.rotary_emb, RotaryTables):
        for part in parts:
            if part.get("rope_type") in ("dynamic", "longrope"):
                trained = part.get("original_max_position_embeddings") or longest
                return trained, (
                    f"beyond them {part['rope_type']} positions depend on the longest row of a call, so that a "
                    "request's tokens would depend on the others"
                )
    return longest, f"{type(model).__name__} has no positions beyond them"
