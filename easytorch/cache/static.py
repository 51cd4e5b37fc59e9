"""A cache of fixed size for a decode step whose shapes stay: every layer keeps all of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
)

from easytorch.cache.metadata import sizes_of

# transformers' names for layers that keep a state in place of keys and values, both, or nothing
LINEAR, BOTH, NONE = "linear_attention", "hybrid", frozenset({"dummy", "moe", "mlp"})
INDEXED = "indexed_attention"  # layers with the keys of an indexer beside their own

_OTHERS: dict[str, Any] = {
    **dict.fromkeys((LINEAR, *NONE), LinearAttentionLayer),
    BOTH: LinearAttentionAndStaticFullAttentionLayer,
    INDEXED: StaticIndexedLayer,
}
# How many times the bytes of the cache: what is read in vain then takes less than a launch for each operator.
_WEIGHTS = 4
# Lengths are powers of two from here on, so that runs of up to about a hundred tokens share their programs.
LEAST_CACHE = 128
# Layers that keep nothing in Python that changes with a token.
_STATIC = (StaticLayer, LinearAttentionLayer, LinearAttentionAndStaticFullAttentionLayer, StaticIndexedLayer)


def bucket(length: int, least: int) -> int:
    """The smallest power of two that is at least `length` and `least`."""
    return max(least, 1 << (length - 1).bit_length())


def full_static_cache(types: Sequence[str], length: int) -> Cache:
    """One of `length` tokens for layers of these types. Those with a window keep the full length too, and have the
    window in their mask: transformers rolls them with a Python counter."""
    return Cache(layers=[_OTHERS.get(kind, StaticLayer)(max_cache_len=length) for kind in types])


def changes_on_the_device_alone(cache: Any) -> bool:
    """Whether a token more changes nothing of `cache` but values of its tensors."""
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        return False
    return all(type(layer) in _STATIC and not getattr(layer, "record_past", False) for layer in cache.layers)


def static_bytes(config: Any, rows: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `rows` sequences of `length` tokens, of a model whose layers all have them."""
    heads, key_dim, value_dim = sizes_of(config)
    return int(config.num_hidden_layers * rows * length * heads * (key_dim + value_dim) * dtype.itemsize)


def reads_little(model: Any, rows: int, length: int) -> bool:
    """Whether a cache of fixed size, all of which is read at every token, is small beside the weights, and changes no
    token."""
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    config: Any = model.config.get_text_config(decoder=True)
    if INDEXED in (getattr(config, "layer_types", None) or ()):
        return False  # of keys that score alike the indexer takes others where the row is longer
    return bool(weights >= _WEIGHTS * static_bytes(config, rows, length, model.dtype))
