"""BLOOM (arXiv:2211.05100): layer norms, ALiBi in place of positions, and one matrix for q, k and v, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BloomConfig, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions

from easytorch.cache_names import CACHE
from easytorch.layers.alibi import AlibiAttention, AlibiBackbone
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.decoder import DecoderLayer
from easytorch.layers.encoder import check_heads
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by, same_as
from easytorch.models.gpt_neox import GPTNeoXAttention
from easytorch.protocol.native import NativeDecoder


class BloomMLP(PlainMLP):
    up_name, down_name, act_name = "dense_h_to_4h", "dense_4h_to_h", "gelu_impl"
    pretraining_tp, slow_but_exact = given_by("config.pretraining_tp"), given_by("config.slow_but_exact")

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 4 * config.hidden_size, "gelu_pytorch_tanh", bias=True)
        self.hidden_dropout = config.hidden_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), self.hidden_dropout, self.training)


class BloomAttention(AlibiAttention, GPTNeoXAttention):
    """With q, k and v stored as GPT-NeoX's."""

    pretraining_tp, slow_but_exact = given_by("config.pretraining_tp"), given_by("config.slow_but_exact")
    split_size, inv_norm_factor = given_by("config.hidden_size"), same_as("scaling")

    def __init__(self, config: Any, layer_idx: int) -> None:
        check_heads(config.hidden_size, config.num_attention_heads, "hidden_size or n_head")
        super().__init__(config, layer_idx, bias=True)
        self.hidden_dropout = config.hidden_dropout

    @property
    def beta(self) -> float:
        """The factor of the bias, which is made for all layers at once: it cannot be set."""
        return 1.0

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().project_output(attended), self.hidden_dropout, self.training)


class BloomBlock(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    With `apply_residual_connection_post_layernorm`, norm(x) stands in place of x in both sums.
    """

    attention_class = BloomAttention
    mlp_class = BloomMLP
    norm_class = LayerNorm
    norm_eps = "layer_norm_epsilon"
    num_heads, hidden_dropout = given_by("config.n_head"), given_by("config.hidden_dropout")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = self.new_norm(config)
        self.self_attention = self.attention_class(config, layer_idx)
        self.post_attention_layernorm = self.new_norm(config)
        self.mlp = self.mlp_class(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        after_norm = self.apply_residual_connection_post_layernorm
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attention(hidden_states=normed, **kwargs)
        hidden_states = attended + (normed if after_norm else hidden_states)
        normed = self.post_attention_layernorm(hidden_states)
        return self.mlp(normed) + (normed if after_norm else hidden_states)


class BloomPreTrainedModel(NativeDecoder):
    config: BloomConfig
    config_class = BloomConfig
    base_model_prefix = "transformer"
    head_weights = (r"^(lm_head|score|classifier|qa_outputs)\.",)
    _input_embed_layer = "word_embeddings"
    _supports_flex_attn = False  # which takes no bias
    _no_split_modules = ["BloomBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": BloomBlock, "attentions": BloomAttention}  # noqa: RUF012

    def __init__(self, config: BloomConfig, *args: Any, **kwargs: Any) -> None:
        if (why := self.refusal(config, {})) is not None:
            raise ValueError(f"bloom: {why}; set slow_but_exact to false")
        super().__init__(config, *args, **kwargs)

    @classmethod
    def refusal(cls, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> str | None:
        if not config.slow_but_exact or config.pretraining_tp <= 1:
            return None
        return f"config.slow_but_exact with config.pretraining_tp={config.pretraining_tp} leaves out biases of products"


_INPUTS = ("input_ids", CACHE, "attention_mask", "inputs_embeds")


class BloomModel(AlibiBackbone, ArgumentsInOrder, BloomPreTrainedModel):
    embed_dim, num_heads = given_by("config.hidden_size"), given_by("config.n_head")
    layer_class = BloomBlock
    output_class = BaseModelOutputWithPastAndCrossAttentions
    layers_name, norm_name = "h", "ln_f"
    arguments = (*_INPUTS, "use_cache")
    by_keyword = ("position_ids",)

    def add_modules(self, config: Any) -> None:
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = self.layer_class.new_norm(config)
        self.h = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = self.layer_class.new_norm(config)

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.word_embeddings_layernorm(inputs_embeds)
        return normed


class BloomForCausalLM(CausalLMHead, ArgumentsInOrder, BloomPreTrainedModel, GenerationMixin):
    backbone_class = BloomModel
    arguments = (*_INPUTS, "labels", "use_cache")
    by_keyword = ("logits_to_keep", "position_ids")
    output_class = CausalLMOutputWithCrossAttentions
    _tied_weights_keys = {"lm_head.weight": "transformer.word_embeddings.weight"}  # noqa: RUF012
    _tp_plan = _pp_plan = _fsdp_plan = None  # transformers has none


class BloomForSequenceClassification(SequenceClassificationHead, ArgumentsInOrder, BloomPreTrainedModel):
    backbone_class = BloomModel
    arguments = (*_INPUTS, "labels", "use_cache")
    by_keyword = ("position_ids",)


class BloomForTokenClassification(TokenClassificationHead, ArgumentsInOrder, BloomPreTrainedModel):
    backbone_class = BloomModel
    classifier_name = "classifier"
    arguments = (*_INPUTS, "labels", "use_cache")
    by_keyword = ("position_ids",)


class BloomForQuestionAnswering(QuestionAnsweringHead, ArgumentsInOrder, BloomPreTrainedModel):
    backbone_class = BloomModel
    arguments = ("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions")
    by_keyword = ("position_ids",)
