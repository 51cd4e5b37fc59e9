"""GPT-NeoX, Pythia (arXiv:2204.06745): attention and MLP in parallel, each with its norm; one matrix for q, k, v."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, GPTNeoXConfig

from easytorch.cache_names import CACHE
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.linear import linear
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.layers.stock_names import same_as
from easytorch.protocol.native import NativeDecoder


class GPTNeoXMLP(PlainMLP):
    up_name, down_name, act_name = "dense_h_to_4h", "dense_4h_to_h", "act"

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)


class GPTNeoXAttention(GroupedAttention):
    head_size = same_as("head_dim")
    output_name = "dense"

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        hidden = self.config.hidden_size
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.dense = nn.Linear(hidden, hidden, bias=out_bias)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # stored head by head: query, key and value of one, then those of the next
        return linear(self.query_key_value, hidden_states).unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)


class GPTNeoXLayer(DecoderLayer):
    """mlp(norm(x)) + attention(norm(x)) + x, or one after the other without `use_parallel_residual`."""

    attention_class = GPTNeoXAttention
    mlp_class = GPTNeoXMLP
    norm_class = LayerNorm
    norm_eps = "layer_norm_eps"

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = self.new_norm(config)
        self.post_attention_layernorm = self.new_norm(config)
        self.post_attention_dropout = nn.Dropout(config.hidden_dropout)
        self.post_mlp_dropout = nn.Dropout(config.hidden_dropout)
        self.attention = self.attention_class(config, layer_idx)
        self.mlp = self.mlp_class(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.attention(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        attended = self.post_attention_dropout(attended) + hidden_states
        read = hidden_states if self.use_parallel_residual else attended
        return self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(read))) + attended


class GPTNeoXPreTrainedModel(NativeDecoder):
    config: GPTNeoXConfig
    config_class = GPTNeoXConfig
    base_model_prefix = "gpt_neox"
    head_weights = (r"^(lm_head|embed_out|score|classifier|qa_outputs)\.",)  # `embed_out`: the lm_head on disk
    _input_embed_layer = "embed_in"
    _no_split_modules = ["GPTNeoXLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": GPTNeoXLayer, "attentions": GPTNeoXAttention}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = ["attention.bias", "attention.masked_bias"]  # noqa: RUF012


_INPUTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", CACHE)


class GPTNeoXModel(DecoderBackbone, ArgumentsInOrder, GPTNeoXPreTrainedModel):
    layer_class = GPTNeoXLayer
    rotary_class = PartialRotaryEmbedding
    norm_name = "final_layer_norm"
    arguments = (*_INPUTS, "use_cache")

    def add_modules(self, config: Any) -> None:
        super().add_modules(config)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)

    @staticmethod
    def embedding(config: Any) -> nn.Embedding:
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.emb_dropout(inputs_embeds)


class GPTNeoXForCausalLM(CausalLMHead, ArgumentsInOrder, GPTNeoXPreTrainedModel, GenerationMixin):
    backbone_class = GPTNeoXModel
    arguments = (*_INPUTS, "labels", "use_cache", "logits_to_keep")
    _tied_weights_keys = {"lm_head.weight": "gpt_neox.embed_in.weight"}  # noqa: RUF012
    _fsdp_plan = None  # transformers has none


class GPTNeoXForSequenceClassification(SequenceClassificationHead, ArgumentsInOrder, GPTNeoXPreTrainedModel):
    backbone_class = GPTNeoXModel
    arguments = (*_INPUTS, "labels", "use_cache")


class GPTNeoXForTokenClassification(TokenClassificationHead, ArgumentsInOrder, GPTNeoXPreTrainedModel):
    backbone_class = GPTNeoXModel
    classifier_name = "classifier"
    arguments = (
        "input_ids", CACHE, "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels", "use_cache"
    )  # fmt: skip


class GPTNeoXForQuestionAnswering(QuestionAnsweringHead, ArgumentsInOrder, GPTNeoXPreTrainedModel):
    backbone_class = GPTNeoXModel
    arguments = (
        "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "start_positions",
        "end_positions",
    )  # fmt: skip
