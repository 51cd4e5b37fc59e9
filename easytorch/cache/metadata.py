"""`TransformerMetadata`: the sizes of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache, get_layer_types_and_kwargs

from easytorch.cache.arguments import positive


@dataclass(frozen=True, kw_only=True)
class TransformerMetadata:
    """The sizes of a cache of `batch_size` rows of up to `max_length` tokens, by layer.

    layer_types: as transformers' caches name them. num_heads, key_dim, value_dim: of attention with plain keys and
    values, the largest where layers differ; layers that keep something else (recurrent states, latents) allocate what
    they are given.
    """

    batch_size: int
    max_length: int
    pad_token_id: int
    layer_types: tuple[str, ...]
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        positive(batch_size=self.batch_size, max_length=self.max_length)

    @classmethod
    def of(
        cls, config: PreTrainedConfig, dtype: torch.dtype, batch_size: int, max_length: int, pad_token_id: int | None
    ) -> TransformerMetadata:
        """For a model of `config`."""
        settings: Any = config.get_text_config(decoder=True)
        heads, key_dim, value_dim = sizes_of(settings)
        padding = pad_token_id if pad_token_id is not None else getattr(settings, "pad_token_id", None)
        return cls(
            batch_size=batch_size,
            max_length=max_length,
            pad_token_id=0 if padding is None else padding,
            layer_types=tuple(get_layer_types_and_kwargs(settings)[0]),
            num_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def check(self, cache: Any) -> None:
        """`ValueError` for a cache of other layers, rows or length."""
        if cache is None:
            raise ValueError("cache_metadata describes the cache of the call, and none is given")
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if not isinstance(own, Cache):
            raise ValueError(f"the cache must be a transformers Cache, not {type(cache).__name__}")
        if own.layers and len(own) != self.num_hidden_layers:
            raise ValueError(f"the cache has {len(own)} layers, and cache_metadata {self.num_hidden_layers}")
        for name, given in (("max_length", _longest(own)), ("batch_size", getattr(own, "rows", None))):
            if given is not None and given != getattr(self, name):
                raise ValueError(f"the cache has {name}={given}, and cache_metadata {getattr(self, name)}")


def sizes_of(config: Any) -> tuple[int, int, int]:
    """(key/value heads, head_dim of keys, of values) of a decoder's config, the largest where layers differ; zeros
    where it has no attention."""
    if config.is_heterogeneous:
        of_layers = [sizes_of(of_layer) for of_layer in config.per_layer_config]
        return max(one[0] for one in of_layers), max(one[1] for one in of_layers), max(one[2] for one in of_layers)
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 0
    if not heads:
        return 0, 0, 0
    groups = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        groups = 1  # Falcon's and GPTBigCode's word for it; Falcon's newer layers cache their keys for each head
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim is not None and getattr(config, "qk_rope_head_dim", None) is not None:
        return groups, config.qk_nope_head_dim + config.qk_rope_head_dim, value_dim
    return groups, head_dim, head_dim


def _longest(cache: Cache) -> int | None:
    longest = cache.get_max_length() if cache.layers else -1
    own = getattr(cache, "longest", None)
    return own if own is not None else longest if longest > 0 else None
