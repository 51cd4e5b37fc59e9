"""Phi 3 (arXiv:2404.14219): Llama's decoder whose query, key and value, and gate and up, are one matrix each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Phi3Config, PreTrainedConfig

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import activation
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.gate import gated
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.linear import linear
from easytorch.layers.masks import all_within_window
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.protocol.native import NativeDecoder


class Phi3MLP(nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation_fn = activation(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = linear(self.gate_up_proj, hidden_states).chunk(2, dim=-1)
        return linear(self.down_proj, gated(self.activation_fn, gate, up))


class Phi3Attention(GroupedAttention):
    types_of_layers = staticmethod(all_within_window)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=False)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        hidden, width = self.config.hidden_size, self.num_heads * self.head_dim
        self.o_proj = nn.Linear(width, hidden, bias=out_bias)
        self.qkv_proj = nn.Linear(hidden, width + 2 * self.num_key_value_heads * self.head_dim, bias=bias)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = linear(self.qkv_proj, hidden_states).unflatten(-1, (-1, self.head_dim))
        return heads.split((self.num_heads, self.num_key_value_heads, self.num_key_value_heads), dim=2)


class Phi3DecoderLayer(DecoderLayer):
    attention_class = Phi3Attention
    mlp_class = Phi3MLP

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self.resid_attn_dropout = nn.Dropout(config.resid_pdrop)
        self.resid_mlp_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.resid_attn_dropout(attended)
        return hidden_states + self.resid_mlp_dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class Phi3PreTrainedModel(NativeDecoder):
    config: Phi3Config
    config_class = Phi3Config
    _no_split_modules = ["Phi3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Phi3DecoderLayer, "attentions": Phi3Attention}  # noqa: RUF012


class Phi3Model(DecoderBackbone, Phi3PreTrainedModel):
    layer_class = Phi3DecoderLayer
    rotary_class = PartialRotaryEmbedding


class Phi3ForCausalLM(CausalLMHead, Phi3PreTrainedModel, GenerationMixin):
    backbone_class = Phi3Model

    @takes_cache
    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, cache: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Past the trained length longrope takes its long factors, and the cache is recomputed. inputs_embeds:
        `generate` looks whether this has it."""
        trained = self.config.original_max_position_embeddings
        if cache and input_ids.shape[1] > trained >= cache.get_seq_length():
            cache, kwargs["next_sequence_length"] = None, None
        prepare: Any = super().prepare_inputs_for_generation
        return prepare(input_ids=input_ids, **cache_keyword(cache), inputs_embeds=inputs_embeds, **kwargs)


class Phi3ForSequenceClassification(SequenceClassificationHead, Phi3PreTrainedModel):
    backbone_class = Phi3Model


class Phi3ForTokenClassification(TokenClassificationHead, Phi3PreTrainedModel):
    backbone_class = Phi3Model
