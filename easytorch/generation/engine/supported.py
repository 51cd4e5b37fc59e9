"""Which models the engine supports: each layer attends over pages, has a recurrent state, or does not mix tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from easytorch.generation.model_layers import numbered
from easytorch.layers.config import attn_implementation, wants_attentions
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.latent_attention import LatentAttention
from easytorch.layers.masks import CHUNKED
from easytorch.layers.recurrent import runs_per_sequence
from easytorch.layers.rotary import RotaryTables
from easytorch.layers.shared_keys import SharedKeysAttention
from easytorch.layers.sparse_indexer import SparseLatentAttention


def refusal(model: Any) -> str | None:
    """The reason why the engine cannot run `model`; None if it can."""
    name = type(model).__name__
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        return f"{name} is not a causal language model; load one with AutoModelForCausalLM"
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder, whose keys are not in pages; use model.generate"
    layers = cached_layers(model)
    if layers is None:
        return (
            f"{name} is not a native decoder, and cannot attend over pages; docs/models.md lists the native ones, and "
            "model.generate_batch is transformers' own engine"
        )
    for layer in layers.modules:
        if runs_per_sequence(layer):
            continue
        known = next((one for one in _ATTENTIONS if isinstance(layer, one)), None)
        if known is None or type(layer).forward is not known.forward:
            return f"{name} has layers of {type(layer).__name__}, which cannot attend over pages; use model.generate"
        if (why := getattr(layer, "pages_refusal", None)) is not None:
            return f"{name} {why}; use model.generate"
        if getattr(layer, "is_causal", True) is False:
            return f"{name} attends to later tokens, which have not been generated; use model.generate"
    if len(layers.modules) != layers.expected:
        return f"{name} has {len(layers.modules)} attentions and states in {layers.expected} layers; use model.generate"
    if model.training:
        return f"{name} is in training mode, where dropout applies: call model.eval()"
    implementation = attn_implementation(model.config)
    if any(not _attends_to_pages(layer, implementation) for layer in layers.modules):
        return (
            f"{name} was loaded with attn_implementation={implementation!r}, which cannot attend over pages or returns "
            'attention weights; load it with attn_implementation="easytorch"'
        )
    return None


class CachedLayers(NamedTuple):
    """modules: attention and recurrent layers. types: of the decoder's layers. expected: how many modules they have."""

    modules: list[Any]
    types: list[str]
    expected: int

    @property
    def attentions(self) -> list[int]:
        """The indices of the layers with keys and values of their own, or latents."""
        keep = (one for one in self.modules if isinstance(one, _ATTENTIONS) and not getattr(one, "reads", False))
        return [layer.layer_idx for layer in keep]

    @property
    def has_states(self) -> bool:
        return any(map(runs_per_sequence, self.modules))

    @property
    def has_latents(self) -> bool:
        return any(isinstance(layer, LatentAttention) for layer in self.modules)


_ATTENTIONS = (SharedKeysAttention, GroupedAttention, SparseLatentAttention, LatentAttention)
# Types of layers that do not mix tokens.
_WITHOUT_CACHE = ("moe", "mlp")


def cached_layers(model: Any) -> CachedLayers | None:
    """The layers of a native decoder that have something in the cache; None for another model."""
    base = model.base_model
    backbone = backbone_of(model)
    if backbone is None and not any(map(runs_per_sequence, base.modules())):
        return None
    types = ["state"] * model.config.num_hidden_layers if backbone is None else list(backbone.layer_types)
    # both an attention and a state: a mapping of two masks
    both = {} if backbone is None else {one for one in types if isinstance(backbone.masks_of[one], Mapping)}
    expected = sum(0 if one in _WITHOUT_CACHE else 2 if one in both else 1 for one in types)
    return CachedLayers(numbered(base), types, expected)


def empty_masks(model: Any) -> dict[str, None] | None:
    """The masks of a step, None for each layer type: the page tables determine which keys are attended to."""
    backbone = backbone_of(model)
    if backbone is None:
        return None
    given: dict[str, None] = dict.fromkeys(backbone.layer_types)
    for one in backbone.layer_types:
        if isinstance(parts := backbone.masks_of[one], Mapping):
            given |= dict.fromkeys(parts)
    return given


def _attends_to_pages(layer: Any, implementation: str) -> bool:
    if isinstance(layer, SparseLatentAttention):  # it runs as it is, a sequence at a time
        return implementation in ("easytorch", "sdpa") and not wants_attentions(layer.config)
    if isinstance(layer, LatentAttention):
        return layer.attends_to_pages({})
    return not isinstance(layer, GroupedAttention) or layer.features_of_pages(implementation, {}) is not None


def backbone_of(model: Any) -> DecoderBackbone | None:
    """The native decoder of a language model (in OPT an attribute of the base model), or None."""
    base = model.base_model
    return next((one for one in (base, getattr(base, "decoder", None)) if isinstance(one, DecoderBackbone)), None)


def page_size_refusal(model: Any, page_size: int) -> str | None:
    """The reason why pages of so many tokens do not suit `model`: chunks of attention begin with a page."""
    layers = cached_layers(model)
    size = model.config.get_text_config(decoder=True).attention_chunk_size if layers and CHUNKED in layers.types else 0
    if size % page_size == 0:
        return None
    return f"page_size={page_size} must divide attention_chunk_size={size} of {type(model).__name__}"


def max_sequence_length(model: Any) -> tuple[int | None, str]:
    """The most tokens of a request, prompt and output, None for no limit; and the reason for the limit."""
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
