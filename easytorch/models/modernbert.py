"""ModernBERT (arXiv:2412.13663): pre-norm layers, rotary positions, windows in most layers, a gated MLP, no padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import ModernBertConfig
from transformers import initialization as init
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.attention import NATIVE_INTERFACES, interface_of
from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.config import attn_implementation, wants_attentions
from easytorch.layers.documents import Documents, documents_of
from easytorch.layers.encoder import check_heads
from easytorch.layers.encoder_heads import (
    EncoderHead,
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
)
from easytorch.layers.gate import gated
from easytorch.layers.heads import labels_of
from easytorch.layers.linear import linear
from easytorch.layers.masks import FULL, SLIDING, Masks, check_layer_types, types_of_config
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import LayerTypeRotaryEmbedding, rotary
from easytorch.layers.stock_names import given_by
from easytorch.layers.word_loss import fused_word_loss
from easytorch.protocol.native import NativeModel

ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels")


def new_norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class ModernBertEmbeddings(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.norm = new_norm(config)
        self.drop = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        return self.drop(self.norm(self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds))


class ModernBertMLP(nn.Module):
    """out(act(a) * b) where a and b are one product: (..., D) -> (..., D)."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, config.intermediate_size * 2, bias=config.mlp_bias)
        self.act = activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        up, gate = linear(self.Wi, hidden_states).chunk(2, dim=-1)
        return linear(self.Wo, self.drop(gated(self.act, up, gate)))


class ModernBertAttention(nn.Module):
    deterministic_flash_attn = given_by("config.deterministic_flash_attn")
    is_causal = False

    def __init__(self, config: ModernBertConfig, layer_idx: int) -> None:
        super().__init__()
        hidden_size, heads = config.hidden_size, config.num_attention_heads
        check_heads(hidden_size, heads)
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = hidden_size // heads
        self.attention_dropout = config.attention_dropout
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size, bias=config.attention_bias)
        # the config counts the keys on one side, attention the query too
        self.sliding_window = config.sliding_window + 1 if types_of_config(config)[layer_idx] == SLIDING else None
        self.Wo = nn.Linear(hidden_size, hidden_size, bias=config.attention_bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        documents: Documents | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, D), or (1, N, D) of `documents`, and cos and sin -> the same shape, weights or None."""
        projected = linear(self.Wqkv, hidden_states).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = projected.unbind(2)
        query, key = rotary(query, key, *position_embeddings)
        heads = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        attend = interface_of(attn_implementation(self.config))
        kwargs |= {
            "scaling": self.head_dim**-0.5,
            "dropout": self.attention_dropout if self.training else 0.0,
            "sliding_window": self.sliding_window,
        }
        if documents is None:
            output, weights = attend(self, *heads, attention_mask, **kwargs)
        else:
            output, weights = documents.attend(attend, self, *heads, **kwargs)
        return self.out_drop(linear(self.Wo, output.flatten(2))), weights


class ModernBertEncoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); the embeddings are normalised already."""

    layer_idx = given_by("attn.layer_idx")

    def __init__(self, config: ModernBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn_norm = new_norm(config) if layer_idx else nn.Identity()
        self.attn = ModernBertAttention(config, layer_idx)
        self.mlp_norm = new_norm(config)
        self.mlp = ModernBertMLP(config)
        self.attention_type = types_of_config(config)[layer_idx]

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attn(self.attn_norm(hidden_states), attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class ModernBertPredictionHead(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.classifier_bias)
        self.act = activation(config.classifier_activation)
        self.norm = new_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(linear(self.dense, hidden_states)))


class ModernBertPreTrainedModel(NativeModel):
    config: ModernBertConfig
    config_class = ModernBertConfig
    base_model_prefix = "model"
    _no_split_modules = ["ModernBertEmbeddings", "ModernBertEncoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": ModernBertEncoderLayer,
        "attentions": ModernBertAttention,
    }
    head_weights = (r"^(head|decoder|classifier)\.",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config = self.config
        first, last = config.initializer_range, config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers)
        spread = {
            ModernBertEmbeddings: {"tok_embeddings": first},
            ModernBertMLP: {"Wi": first, "Wo": last},
            ModernBertAttention: {"Wqkv": first, "Wo": last},
            ModernBertPredictionHead: {"dense": last},
        }.get(type(module), {})
        if isinstance(module, EncoderHead):
            spread = {"decoder": last} if hasattr(module, "decoder") else {"classifier": config.hidden_size**-0.5}
        cut = 3 if config.initializer_cutoff_factor is None else config.initializer_cutoff_factor
        for name, std in spread.items():
            part = getattr(module, name)
            init.trunc_normal_(part.weight, mean=0.0, std=std, a=-cut * std, b=cut * std)
            if getattr(part, "bias", None) is not None:
                init.zeros_(part.bias)


class ModernBertModel(ModernBertPreTrainedModel):
    has_pooler = False

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__(config)
        check_layer_types(config, types_of_config(config), (FULL, SLIDING))
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nn.ModuleList(ModernBertEncoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = new_norm(config)
        self.rotary_emb = LayerTypeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.tok_embeddings = value  # type: ignore[assignment]

    def make_masks(self, hidden_states: torch.Tensor, attention_mask: Any) -> Masks:
        """The mask of each layer type, None where every token attends to all others in its window."""
        given = {"config": self.config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
        full = create_bidirectional_mask(**given)
        if full is None and attn_implementation(self.config) in NATIVE_INTERFACES:
            return {FULL: None, SLIDING: None}
        return {FULL: full, SLIDING: create_bidirectional_sliding_window_mask(**given)}

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding; (B, 1, T, T) of any pattern; or one for each type of
        layer. Without gradients, padding on the right is left out where there is much of it, and its states are zeros.
        """
        check_one_input(input_ids, inputs_embeds)
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None, "check_one_input says so"
        length, device = given.shape[1], self.device
        if position_ids is None:
            position_ids = torch.arange(length, device=device)[None]
        documents = None
        if attn_implementation(self.config) in NATIVE_INTERFACES and not wants_attentions(self.config):
            documents = documents_of(attention_mask, self.layers)
        if documents is not None:
            input_ids = None if input_ids is None else documents.pack(input_ids)
            inputs_embeds = None if inputs_embeds is None else documents.pack(inputs_embeds)
            position_ids, attention_mask = documents.pack(position_ids), {FULL: None, SLIDING: None}
        hidden_states = self.embeddings(input_ids, inputs_embeds)
        masks: Masks = (
            attention_mask if isinstance(attention_mask, dict) else self.make_masks(hidden_states, attention_mask)
        )
        kinds = types_of_config(self.config)
        positions = self.rotary_emb.by_layer_type(hidden_states, position_ids, kinds)
        for layer, kind in zip(self.layers, kinds, strict=True):
            hidden_states = layer(
                hidden_states,
                masks[kind],
                position_embeddings=positions[kind],
                documents=documents,
                **kwargs,
            )
        hidden_states = self.final_norm(hidden_states)
        return BaseModelOutput(
            last_hidden_state=hidden_states if documents is None else documents.unpack(hidden_states)
        )


class ModernBertForMaskedLM(EncoderMaskedLM, ModernBertPreTrainedModel):
    backbone_class = ModernBertModel
    arguments = ARGUMENTS
    _tied_weights_keys = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}  # noqa: RUF012

    def add_head(self, config: ModernBertConfig) -> None:
        self.sparse_prediction = config.sparse_prediction
        self.sparse_pred_ignore_index = config.sparse_pred_ignore_index
        self.head = ModernBertPredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=config.decoder_bias)

    def predicted(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if labels is None or not self.sparse_prediction:
            return hidden_states, labels
        masked = labels.flatten() != self.sparse_pred_ignore_index
        return hidden_states.flatten(0, 1)[masked], labels.flatten()[masked]

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.decoder, self.head(hidden_states))

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_states)

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)

    def fused_loss(self, hidden_states: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        if self.loss_function is not ForMaskedLMLoss or "ignore_index" in kwargs:
            return None
        return fused_word_loss(self, hidden_states, labels, num_items_in_batch=kwargs.get("num_items_in_batch"))

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings  # type: ignore[assignment]


def add_classifier(model: nn.Module, config: ModernBertConfig, labels: int) -> None:
    """The modules of the classifiers, in the order of transformers: optimizer states follow it."""
    model.head = ModernBertPredictionHead(config)
    model.drop = nn.Dropout(config.classifier_dropout)
    model.classifier = nn.Linear(config.hidden_size, labels)


class ModernBertForSequenceClassification(EncoderSequenceClassification, ModernBertPreTrainedModel):
    backbone_class = ModernBertModel
    arguments = ARGUMENTS
    head: nn.Module
    drop: nn.Module
    classifier: nn.Module

    def add_head(self, config: ModernBertConfig) -> None:
        add_classifier(self, config, labels_of(config))

    def first(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(B, T, D) -> (B, D) of position 0, as in transformers, even where that is padding on the left."""
        return hidden_states[:, 0]

    def classify(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        hidden_states = outputs.last_hidden_state
        if self.config.classifier_pooling == "cls":
            pooled = self.first(hidden_states, attention_mask)
        elif attention_mask is None:
            pooled = hidden_states.mean(1)
        else:
            pooled = (hidden_states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.classifier(self.drop(self.head(pooled)))


class ModernBertForTokenClassification(EncoderTokenClassification, ModernBertPreTrainedModel):
    backbone_class = ModernBertModel
    arguments = ARGUMENTS
    head: nn.Module
    drop: nn.Module
    classifier: nn.Linear

    def add_head(self, config: ModernBertConfig) -> None:
        add_classifier(self, config, labels_of(config))

    def classify(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.drop(self.head(hidden_states)))


class ModernBertForQuestionAnswering(EncoderQuestionAnswering, ModernBertPreTrainedModel):
    backbone_class = ModernBertModel
    arguments = ("input_ids", "attention_mask", "position_ids", "start_positions", "end_positions")
    add_head = ModernBertForTokenClassification.add_head
    answer = ModernBertForTokenClassification.classify


class ModernBertForMultipleChoice(EncoderMultipleChoice, ModernBertPreTrainedModel):
    backbone_class = ModernBertModel
    arguments = ARGUMENTS
    score = ModernBertForSequenceClassification.classify

    def add_head(self, config: ModernBertConfig) -> None:
        add_classifier(self, config, 1)

    def first(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(B, T, D) -> (B, D) of the first token that is not padding."""
        if attention_mask is None:
            return hidden_states[:, 0]
        rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        return hidden_states[rows, attention_mask.argmax(-1)]
