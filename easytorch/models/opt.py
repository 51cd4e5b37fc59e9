"""OPT (arXiv:2205.01068): learned positions with an offset of two, norms before each part or after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin, OPTConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import CACHE
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.basics import activation
from easytorch.layers.config_checks import padding_of
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, QuestionAnsweringHead, SequenceClassificationHead
from easytorch.layers.linear import linear
from easytorch.layers.masks import Masks
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by, same_as
from easytorch.protocol.native import NativeDecoder


class OPTLearnedPositionalEmbedding(nn.Embedding):
    """position_ids (B, T) -> (B, T, D). Positions are offset by two: the first rows are padding's."""

    offset = 2

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + self.offset)


class OPTAttention(GroupedAttention):
    output_name = "out_proj"
    embed_dim, enable_bias = given_by("config.hidden_size"), given_by("config.enable_bias")
    dropout = same_as("attention_dropout")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.enable_bias)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=bias))

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query * self.scaling, key

    @property
    def score_scale(self) -> float:
        return 1.0  # `rotate` scales the queries


class OPTDecoderLayer(DecoderLayer):
    embed_dim = given_by("config.hidden_size")
    attention_class = OPTAttention

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.do_layer_norm_before = config.do_layer_norm_before
        self.dropout, self.layerdrop = config.dropout, config.layerdrop
        self.self_attn = self.attention_class(config, layer_idx)
        self.activation_fn = activation(config.activation_function)
        self.self_attn_layer_norm = self.new_norm(config)
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_dim, bias=config.enable_bias)
        self.fc2 = nn.Linear(config.ffn_dim, config.hidden_size, bias=config.enable_bias)
        self.final_layer_norm = self.new_norm(config)

    @classmethod
    def new_norm(cls, config: Any) -> nn.Module:
        return LayerNorm(config.hidden_size, elementwise_affine=config.layer_norm_elementwise_affine)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
            return hidden_states
        before = self.do_layer_norm_before
        read = self.self_attn_layer_norm(hidden_states) if before else hidden_states
        attended, _ = self.self_attn(hidden_states=read, **kwargs)
        hidden_states = hidden_states + nn.functional.dropout(attended, self.dropout, self.training)
        if not before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        read = self.final_layer_norm(hidden_states) if before else hidden_states
        mixed = linear(self.fc2, self.activation_fn(linear(self.fc1, read)))
        hidden_states = hidden_states + nn.functional.dropout(mixed, self.dropout, self.training)
        return hidden_states if before else self.final_layer_norm(hidden_states)


class OPTPreTrainedModel(NativeDecoder):
    config: OPTConfig
    config_class = OPTConfig
    _no_split_modules = ["OPTDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": OPTDecoderLayer, "attentions": OPTAttention}  # noqa: RUF012


class OPTDecoder(DecoderBackbone, OPTPreTrainedModel):
    dropout, max_target_positions = given_by("config.dropout"), given_by("config.max_position_embeddings")
    layer_class = OPTDecoderLayer
    rotary_class = None
    masks_by_positions = False  # as transformers' OPT, which does not read packed sequences out of them

    embed_tokens: nn.Module

    @property
    def layerdrop(self) -> float:
        """The share of layers that training leaves out, each by itself."""
        layers: Any = self.layers
        rate: float = layers[0].layerdrop
        return rate

    @layerdrop.setter
    def layerdrop(self, rate: float) -> None:
        layer: Any
        for layer in self.layers:
            layer.layerdrop = rate

    def add_modules(self, config: Any) -> None:
        hidden, embedded = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, embedded, padding_of(config))
        self.embed_positions = OPTLearnedPositionalEmbedding(config.max_position_embeddings, hidden)
        self.project_out = nn.Linear(hidden, embedded, bias=False) if embedded != hidden else None
        self.project_in = nn.Linear(embedded, hidden, bias=False) if embedded != hidden else None
        normed = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = self.layer_class.new_norm(config) if normed else None
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As transformers' OPT, which takes one row of tokens as (T,) too."""
        return super().embed(input_ids.view(-1, input_ids.shape[-1]))

    def make_masks(
        self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache | None, position_ids: Any
    ) -> Masks:
        return super().make_masks(inputs_embeds, attention_mask, cache, None)

    def default_positions(self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache | None) -> torch.Tensor:
        if attention_mask is None or isinstance(attention_mask, Mapping) or attention_mask.dim() != 2:
            return super().default_positions(inputs_embeds, attention_mask, cache)
        counted = torch.cumsum(attention_mask, dim=1) * attention_mask - 1  # padding is not counted
        return counted.long()[:, -inputs_embeds.shape[1] :]

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.project_in is not None:
            inputs_embeds = linear(self.project_in, inputs_embeds)
        return inputs_embeds + self.embed_positions(position_ids)

    def leave(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.final_layer_norm is not None:
            hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states if self.project_out is None else linear(self.project_out, hidden_states)


_INPUTS = ("input_ids", "attention_mask", CACHE, "inputs_embeds")


class OPTModel(ArgumentsInOrder, OPTPreTrainedModel):
    arguments = (*_INPUTS, "use_cache", "position_ids")

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        self.decoder = OPTDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        return self.decoder(input_ids=input_ids, return_dict=True, **kwargs)


class OPTForCausalLM(CausalLMHead, ArgumentsInOrder, OPTPreTrainedModel, GenerationMixin):
    backbone_class = OPTModel
    arguments = (*_INPUTS, "labels", "use_cache", "position_ids", "logits_to_keep")
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = _pp_plan = _fsdp_plan = None  # transformers has none


class OPTForSequenceClassification(SequenceClassificationHead, ArgumentsInOrder, OPTPreTrainedModel):
    backbone_class = OPTModel
    arguments = (*_INPUTS, "labels", "use_cache", "position_ids")


class OPTForQuestionAnswering(QuestionAnsweringHead, ArgumentsInOrder, OPTPreTrainedModel):
    backbone_class = OPTModel
    arguments = (*_INPUTS, "start_positions", "end_positions", "use_cache", "position_ids")
