"""Attention masks by type of layer, as `config.layer_types` names them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    flash_attention_mask,
    flex_attention_mask,
)

from easytorch.cache_names import cache_keyword
from easytorch.layers.config import attn_implementation

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"  # layers that keep a state in place of keys and values (layers/hybrid.py)


def chunked_mask(config: Any, **given: Any) -> Any:
    """transformers' mask of chunks, which it refuses to make for names with "flash" in them; ours carries it."""
    if attn_implementation(config) == "flash":
        config = copy.copy(config)
        config._attn_implementation_internal = "easytorch"
    return create_chunked_causal_mask(config=config, **given)


# transformers' function for each; what it returns depends on `config._attn_implementation`.
MASKS_OF: dict[str, Callable[..., Any]] = {
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
    CHUNKED: chunked_mask,
}


def slots_refusal(config: Any) -> str | None:
    """Why the attention that `config` names does not know the empty slots of a static cache; None where its mask, of
    all slots, hides them."""
    name = attn_implementation(config)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        return f"no mask is registered for its attention {name!r}"
    if ALL_MASK_ATTENTION_FUNCTIONS[name] is flash_attention_mask:
        return f"the mask of its attention {name!r} is that of the padding, which says nothing of empty slots"
    return None


def masks_refusal(config: Any) -> str | None:
    """Why the masks of a step over a static cache cannot be captured; None where they are tensors of one shape."""
    name = attn_implementation(config)
    if (reason := slots_refusal(config)) is None and ALL_MASK_ATTENTION_FUNCTIONS[name] is flex_attention_mask:
        return f"the masks of its attention {name!r} are no tensors"
    return reason


# A tensor, None where is_causal suffices, or what a registered attention takes as its mask (flex attention).
Masks = Mapping[str, Any]


def all_full(config: PreTrainedConfig) -> list[str]:
    """Every layer attends to all earlier tokens."""
    return [FULL] * config.num_hidden_layers


def all_within_window(config: PreTrainedConfig) -> list[str]:
    """Every layer has the window of `config.sliding_window`, where there is one."""
    return [FULL if config.sliding_window is None else SLIDING] * config.num_hidden_layers


def types_of_config(config: PreTrainedConfig) -> list[str]:
    return config.layer_types


def check_layer_types(
    config: PreTrainedConfig, layer_types: Collection[str] | None, masks_of: Collection[str] = MASKS_OF
) -> None:
    """`ValueError` for an unknown layer type, or a list whose length is not the number of layers."""
    if layer_types is None:
        raise ValueError(f"{config.model_type}: config.layer_types is None; this family has {', '.join(masks_of)}")
    unknown = sorted({str(layer_type) for layer_type in layer_types} - set(masks_of))
    if unknown:
        raise ValueError(
            f"{config.model_type}: config.layer_types names {', '.join(unknown)}; this family has {', '.join(masks_of)}"
        )
    if len(layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"{config.model_type}: config.layer_types has {len(layer_types)} entries for "
            f"num_hidden_layers={config.num_hidden_layers}"
        )


def check_windows(config: PreTrainedConfig, layer_types: Collection[str]) -> None:
    """`ValueError` for a layer type whose window the config lacks, or whose window is below 1."""
    for layer_type, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        size: Any = getattr(config, name, None)
        if layer_type in layer_types and size is None:
            raise ValueError(f"{config.model_type}: config.layer_types has {layer_type}, and config.{name} is None")
        if layer_type in layer_types and size < 1:
            raise ValueError(f"{config.model_type}: config.{name}={size} must be 1 or more: a token sees itself")


def window_of(config: PreTrainedConfig, layer_type: str) -> int | None:
    """The window of such a layer: how many keys a query attends to, its own included; None: all earlier ones."""
    return config.sliding_window if layer_type == SLIDING else None


def masks_by_layer_type(
    config: PreTrainedConfig,
    layer_types: Collection[str],
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | Mapping[str, Any] | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    also_seen: Mapping[str, Callable[..., Any]] | None = None,
    masks_of: Mapping[str, Callable[..., Any]] = MASKS_OF,
) -> Masks:
    """One mask for each layer type of the model, made once per forward, for dynamic and static caches.

    inputs_embeds (B, T, D). attention_mask: (B, past + T), 1 for tokens and 0 for padding; (B, 1, T, S) of any pattern,
    which every layer then uses; or finished masks by layer type. position_ids (B, T) only if the caller gave them: only
    those can pack sequences, and the mask reads their values on the device. also_seen: by layer type, a
    function (batch, head, query, key) that is True for keys seen in addition to the past (transformers'
    `or_mask_function`). masks_of: the mask function of each type.
    """
    if isinstance(attention_mask, Mapping):
        missing = sorted(set(layer_types) - set(attention_mask))
        if missing:
            raise ValueError(
                f"attention_mask has masks for {', '.join(attention_mask)} layers; {config.model_type} has "
                f"{', '.join(missing)} layers too"
            )
        return attention_mask
    return {
        layer_type: masks_of[layer_type](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **cache_keyword(cache),
            position_ids=position_ids,
            or_mask_function=None if also_seen is None else also_seen[layer_type],
        )
        for layer_type in dict.fromkeys(layer_types)
    }
