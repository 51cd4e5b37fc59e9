"""ALiBi (arXiv:2108.12409): in place of positions, a bias of the scores that falls with the distance, at each head's
own slope.

A softmax is the same where all its scores are greater by one number. So slope * (key - query), the bias by distance, is
slope * key for each key, the same for every query: (B, H, 1, S) in place of (B, H, T, S), and a cache of any kind needs
no positions of its queries. Legend: B batch, T tokens, S keys, D hidden size, H heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache

from easytorch.layers.attention import NATIVE_INTERFACES
from easytorch.layers.config import attn_implementation
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.masks import FULL, Masks, masks_by_layer_type
from easytorch.layers.relative_bias import merged

BIAS = "alibi"  # where the bias stands among the masks of a forward


def alibi_slopes(heads: int, device: torch.device | None = None) -> torch.Tensor:
    """(H,) float32: 2^(-8/n), 2^(-16/n), ... of n heads, the greatest power of two that is at most `heads`.

    Further heads have every second slope of 2n heads, as transformers' `build_alibi_tensor` has them. `ValueError` for
    less than one head.
    """
    if heads < 1:
        raise ValueError(f"slopes of {heads} heads were asked for: there must be one or more")
    power = 1 << (heads.bit_length() - 1)
    slopes = _powers(power, 1, power, device)
    if heads == power:
        return slopes
    return torch.cat([slopes, _powers(2 * power, 2, heads - power, device)])


def _powers(heads: int, step: int, count: int, device: torch.device | None) -> torch.Tensor:
    """The 1st, (1 + step)th, ... of the slopes of `heads`, a power of two; made on the device, without a copy to it."""
    base = torch.full((), 2.0 ** -(2.0 ** (3 - math.log2(heads))), device=device)
    return torch.pow(base, torch.arange(1, 1 + step * count, step, device=device, dtype=torch.int32))


def alibi_bias(slopes: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """slopes (H,), the places of the keys (B or 1, S) -> (B or 1, H, 1, S) of `dtype`, from products in float32."""
    return (slopes[:, None, None] * places[:, None, None, :]).to(dtype)


def places_of_keys(attention_mask: torch.Tensor, keys: int) -> torch.Tensor:
    """attention_mask (B, past + T), 1 for tokens and 0 for padding -> (B, S): how many tokens precede each key.

    Padding has 0, and so have the slots of a static cache behind the mask.
    """
    tokens = attention_mask[:, :keys].long()
    places = (tokens.cumsum(-1) - 1) * tokens
    return torch.nn.functional.pad(places, (0, keys - tokens.shape[1]))


class AlibiAttention(GroupedAttention):
    """Attention to whose scores `AlibiBackbone` adds the bias."""

    pages_refusal = "adds a bias of the distance (ALiBi) to its scores, which attention over pages does not carry"

    def features_of_pages(self, implementation: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """None: keys and values are gathered from their pages, and attended to with the bias."""
        return None


class AlibiBackbone(DecoderBackbone):
    """Makes the bias once a forward, for all layers."""

    rotary_class = None

    def make_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | Mapping[str, Any] | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> Masks:
        """Beside the masks, under `BIAS`, what is added to the scores where there is none; else it is in the mask.

        A mask of two dimensions says which place each key has. Otherwise that is its index: padding on the left adds
        one number to all scores of a head.
        """
        masks = super().make_masks(inputs_embeds, attention_mask, cache, position_ids)
        if FULL not in masks:  # no layer
            return masks
        mask, length, device = masks[FULL], inputs_embeds.shape[1], inputs_embeds.device
        if mask is None and attn_implementation(self.config) not in NATIVE_INTERFACES:
            mask = self._mask_of_scores(inputs_embeds, attention_mask, cache, position_ids)
        if isinstance(mask, torch.Tensor):
            keys = mask.shape[-1]
        elif mask is None:
            keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
        else:
            raise ValueError(f"{self.config.model_type}: no bias is added to scores under a {type(mask).__name__}")
        places = torch.arange(keys, device=device)[None]
        if mask is not None and isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            places = places_of_keys(attention_mask.to(device), keys)
        bias = alibi_bias(alibi_slopes(self.config.num_attention_heads, device), places, inputs_embeds.dtype)
        return {**masks, BIAS: bias} if mask is None else {FULL: merged(mask, bias)}

    def _mask_of_scores(self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any, position_ids: Any) -> Any:
        """What eager attention adds to the scores, always a tensor: a function of the user's own, for which
        transformers may make no mask, is told of the bias by the mask alone."""
        config = copy.copy(self.config)
        config._attn_implementation_internal = "eager"
        given = None if isinstance(attention_mask, Mapping) else attention_mask  # one of None: the past is seen
        return masks_by_layer_type(
            config, self.layer_types, inputs_embeds, given, cache, position_ids, masks_of=self.masks_of
        )[FULL]

    def run_layers(
        self, hidden_states: torch.Tensor, masks: Masks, positions: Mapping[str, Any], **kwargs: Any
    ) -> torch.Tensor:
        return super().run_layers(hidden_states, masks, positions, position_bias=masks.get(BIAS), **kwargs)
