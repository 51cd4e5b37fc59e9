"""Caches that were made for another model, refused before a layer writes to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache, get_layer_types_and_kwargs

from easytorch.cache import RaggedPagesCache, TransformerCache
from easytorch.cache.metadata import sizes_of
from easytorch.cache.transformer import EncoderDecoderTransformerCache
from easytorch.cache_names import NAMES

_OWN = (TransformerCache, EncoderDecoderTransformerCache, RaggedPagesCache)
_IN_PAGES = ("full_attention", "sliding_attention")
# What a config has whose decoder may take an encoder's keys, also where the model is the decoder alone.
_OF_AN_ENCODER = ("is_encoder_decoder", "add_cross_attention", "decoder_layers", "num_decoder_layers")
_MADE = "make it by init_cache of this model"


def check_cache_argument(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """`check_cache_of` of the cache in the arguments of a call; once for a cache and a config."""
    for name in NAMES:
        cache = kwargs.get(name)
        if isinstance(cache, Cache | EncoderDecoderCache):
            checked = vars(cache).get("_fits")
            if (checked is None or id(model.config) not in checked) and not torch.compiler.is_compiling():
                check_cache_of(model, cache)
                vars(cache).setdefault("_fits", set()).add(id(model.config))


def check_own_cache(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """The same of caches that `init_cache` and `init_ragged_pages` make, for a class of transformers' own, which may
    take caches of its own that say less of themselves."""
    for name in NAMES:
        if isinstance(kwargs.get(name), _OWN):
            check_cache_argument(model, {name: kwargs[name]})


def check_cache_of(model: PreTrainedModel, cache: Any) -> None:
    """`ValueError` for a cache of another number or kind of layers, or of other heads, than `model` has."""
    name = type(model).__name__
    if isinstance(cache, EncoderDecoderCache):
        if not any(getattr(model.config, one, False) for one in _OF_AN_ENCODER):
            raise ValueError(f"the cache is of a model with an encoder, and {name} has none; {_MADE}")
        cache = cache.self_attention_cache
    config = model.config.get_text_config(decoder=True)
    layer_types, of_layers = get_layer_types_and_kwargs(config)
    # generate(assistant_early_exit=n) drafts with the first n layers; a config may list the types of all
    types = tuple(layer_types[: len(of_layers)])
    if isinstance(cache, RaggedPagesCache):
        _check_pages(cache, types, name)
        return
    if not cache.layers and cache.layer_class_to_replicate is not None:
        return
    grows = cache.layer_class_to_replicate is not None
    # Of T5's two numbers of layers transformers makes a cache by the encoder's: those behind the decoder's stay empty.
    decoders = None if isinstance(cache, TransformerCache) else getattr(config, "num_decoder_layers", None)
    needed = len(types) if decoders is None else int(decoders)
    if (len(cache.layers) > needed and decoders is None) or (len(cache.layers) < needed and not grows):
        raise ValueError(f"the cache has {len(cache.layers)} layers, and {name} has {needed}; {_MADE}")
    if not isinstance(cache, TransformerCache):
        return
    made = cache.metadata
    if made.layer_types != types:
        raise ValueError(f"the cache has layers of {_kinds(made.layer_types)}, and {name} of {_kinds(types)}; {_MADE}")
    given, own = (made.num_heads, made.key_dim, made.value_dim), sizes_of(config)
    if given != own:
        raise ValueError(f"the cache is for (heads, key and value head_dim) of {given}, and {name} has {own}; {_MADE}")


def _check_pages(cache: RaggedPagesCache, types: tuple[str, ...], name: str) -> None:
    layers = cache.metadata.layers
    needed = [index for index, one in enumerate(types) if one in _IN_PAGES]
    if layers[-1] >= len(types) or not set(needed) <= set(layers):
        raise ValueError(
            f"the pages are for {len(layers)} layers, and {name} has {len(types)}; make them by init_ragged_pages of "
            "this model"
        )


def _kinds(types: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(types))
