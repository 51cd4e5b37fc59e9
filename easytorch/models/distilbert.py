"""DistilBERT (arXiv:1910.01108): BERT's layers under names of their own, without token types and pooler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DistilBertConfig
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.config_checks import padding_of
from easytorch.layers.encoder import PostNormEncoder, SelfAttention
from easytorch.layers.encoder_heads import (
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
)
from easytorch.layers.linear import linear
from easytorch.layers.stock_names import given_by, same_as
from easytorch.protocol.native import NativeModel

ARGUMENTS = ("input_ids", "attention_mask", "inputs_embeds", "labels", "position_ids")
EPS = 1e-12


class Embeddings(nn.Module):
    position_ids: torch.Tensor

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.dim, padding_idx=padding_of(config))
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.dim)
        self.LayerNorm = nn.LayerNorm(config.dim, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings)[None], persistent=False)

    def forward(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
        return self.dropout(self.LayerNorm(embeddings + self.position_embeddings(position_ids)))


class DistilBertSelfAttention(SelfAttention):
    fused = ("q_lin", "k_lin", "v_lin")
    dropout_rate = "attention_dropout"
    n_heads, dim = same_as("num_attention_heads"), given_by("config.dim")

    def make_projections(self, hidden_size: int) -> None:
        super().make_projections(hidden_size)
        self.out_lin = nn.Linear(hidden_size, hidden_size)

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        return linear(self.out_lin, attended)


class FFN(nn.Module):
    seq_len_dim = 1  # of `apply_chunking_to_forward`

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.lin1 = nn.Linear(config.dim, config.hidden_dim)
        self.lin2 = nn.Linear(config.hidden_dim, config.dim)
        self.activation = activation(config.activation)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.chunk_size_feed_forward:  # `apply_chunking_to_forward` looks at signatures each time
            return self.ff_chunk(input)
        return apply_chunking_to_forward(self.ff_chunk, self.chunk_size_feed_forward, self.seq_len_dim, input)

    def ff_chunk(self, input: torch.Tensor) -> torch.Tensor:
        return self.dropout(linear(self.lin2, self.activation(linear(self.lin1, input))))


class TransformerBlock(GradientCheckpointingLayer):
    def __init__(self, config: DistilBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = DistilBertSelfAttention(config, layer_idx)
        self.sa_layer_norm = nn.LayerNorm(config.dim, eps=EPS)
        self.ffn = FFN(config)
        self.output_layer_norm = nn.LayerNorm(config.dim, eps=EPS)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *others: None, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.sa_layer_norm(attended + hidden_states)
        return self.output_layer_norm(self.ffn(hidden_states) + hidden_states)


class DistilBertPreTrainedModel(NativeModel):
    config: DistilBertConfig
    config_class = DistilBertConfig
    base_model_prefix = "distilbert"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TransformerBlock,
        "attentions": DistilBertSelfAttention,
    }
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]  # noqa: RUF012
    head_weights = (r"^(vocab_transform|vocab_layer_norm|vocab_projector|pre_classifier|classifier|qa_outputs)\.",)

    def __init__(self, config: DistilBertConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.sinusoidal_pos_embds:
            # Construction computes the table; Flax's checkpoints leave it out.
            self.optional_weights = (r"embeddings\.position_embeddings\.weight$",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Embeddings):
            table = module.position_embeddings.weight
            if self.config.sinusoidal_pos_embds:
                init.copy_(table, create_sinusoidal_embeddings(table.shape[0], table.shape[1], torch.empty_like(table)))
            init.copy_(module.position_ids, torch.arange(module.position_ids.shape[-1])[None])

    def get_position_embeddings(self) -> nn.Embedding:
        embeddings: Embeddings = self.base_model.embeddings
        return embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Positions up to `new_num_position_embeddings`: the first of the old ones, and as many more as that asks."""
        embeddings: Embeddings = self.base_model.embeddings
        config = self.config
        old = embeddings.position_embeddings
        kept = min(old.num_embeddings, new_num_position_embeddings)
        new = nn.Embedding(new_num_position_embeddings, config.dim).to(old.weight.device, old.weight.dtype)
        with torch.no_grad():
            if config.sinusoidal_pos_embds:
                create_sinusoidal_embeddings(new_num_position_embeddings, config.dim, new.weight)
            else:
                new.weight.normal_(std=config.initializer_range)
                new.weight[:kept] = old.weight[:kept]
        config.max_position_embeddings = new_num_position_embeddings
        embeddings.position_embeddings = new
        positions = torch.arange(new_num_position_embeddings, device=old.weight.device)[None]
        embeddings.register_buffer("position_ids", positions, persistent=False)


class DistilBertModel(DistilBertPreTrainedModel):
    has_pooler = False

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.transformer = PostNormEncoder(config, TransformerBlock)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding, or (B, 1, T, T) of any pattern.
        """
        check_one_input(input_ids, inputs_embeds)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        return BaseModelOutput(last_hidden_state=self.transformer(hidden_states, mask, **kwargs))


class DistilBertForMaskedLM(EncoderMaskedLM, DistilBertPreTrainedModel):
    backbone_class = DistilBertModel
    arguments = ARGUMENTS
    _tied_weights_keys = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def add_head(self, config: DistilBertConfig) -> None:
        self.activation = activation(config.activation)
        self.vocab_transform = nn.Linear(config.dim, config.dim)
        self.vocab_layer_norm = nn.LayerNorm(config.dim, eps=EPS)
        self.vocab_projector = nn.Linear(config.dim, config.vocab_size)

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.vocab_projector, self.word_states(hidden_states))

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.vocab_layer_norm(self.activation(linear(self.vocab_transform, hidden_states)))

    def get_output_embeddings(self) -> nn.Module:
        return self.vocab_projector

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.vocab_projector = new_embeddings


class DistilBertForSequenceClassification(EncoderSequenceClassification, DistilBertPreTrainedModel):
    backbone_class = DistilBertModel
    arguments = ARGUMENTS

    def add_head(self, config: DistilBertConfig) -> None:
        self.pre_classifier = nn.Linear(config.dim, config.dim)
        self.classifier = nn.Linear(config.dim, config.num_labels)
        self.dropout = nn.Dropout(config.seq_classif_dropout)

    def classify(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        first = F.relu(linear(self.pre_classifier, outputs.last_hidden_state[:, 0]))
        return linear(self.classifier, self.dropout(first))


class DistilBertForMultipleChoice(EncoderMultipleChoice, DistilBertPreTrainedModel):
    backbone_class = DistilBertModel
    arguments = ARGUMENTS

    def add_head(self, config: DistilBertConfig) -> None:
        self.pre_classifier = nn.Linear(config.dim, config.dim)
        self.classifier = nn.Linear(config.dim, 1)
        self.dropout = nn.Dropout(config.seq_classif_dropout)

    score = DistilBertForSequenceClassification.classify


class DistilBertForTokenClassification(EncoderTokenClassification, DistilBertPreTrainedModel):
    backbone_class = DistilBertModel
    arguments = ARGUMENTS

    def add_head(self, config: DistilBertConfig) -> None:
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.dim, config.num_labels)


class DistilBertForQuestionAnswering(EncoderQuestionAnswering, DistilBertPreTrainedModel):
    backbone_class = DistilBertModel
    arguments = ("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions", "position_ids")

    def add_head(self, config: DistilBertConfig) -> None:
        if config.num_labels != 2:
            raise ValueError(f"config.num_labels should be 2, but it is {config.num_labels}")
        self.qa_outputs = nn.Linear(config.dim, config.num_labels)
        self.dropout = nn.Dropout(config.qa_dropout)

    def answer(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.qa_outputs, self.dropout(hidden_states))
