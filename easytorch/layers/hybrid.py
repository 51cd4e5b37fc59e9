"""Decoders whose layers have either attention or a linear attention with a state, as `config.layer_types` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from easytorch.cache_names import cache_keyword, state_keyword, takes_cache
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.masks import FULL, LINEAR, MASKS_OF
from easytorch.layers.recurrent import recurrent_mask
from easytorch.layers.rotary import PartialRotaryEmbedding, RotaryTables


class HybridLayer(DecoderLayer):
    """A decoder layer whose attention is the one that `config.layer_types` names. linear_name: of the linear one."""

    linear_class: ClassVar[type[nn.Module]]
    linear_name: ClassVar[str] = "linear_attn"

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.block_type = config.layer_types[layer_idx]
        self.is_linear = self.block_type == LINEAR
        if self.is_linear:
            setattr(self, self.linear_name, self.linear_class(config, layer_idx))
        else:
            self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = self.new_mlp(config, layer_idx)
        for name in self.norms:
            setattr(self, name, self.new_norm(config))

    @takes_cache
    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        if self.is_linear:
            attended = getattr(self, self.linear_name)(hidden_states=normalized, **state_keyword(cache), **kwargs)
        else:
            attended, _ = self.self_attn(hidden_states=normalized, **cache_keyword(cache), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HybridBackbone(DecoderBackbone):
    """Full and linear attention, by `config.layer_types`."""

    masks_of: ClassVar[Mapping[str, Callable[..., Any]]] = {FULL: MASKS_OF[FULL], LINEAR: recurrent_mask}
    rotary_class: ClassVar[type[RotaryTables] | None] = PartialRotaryEmbedding
