"""MPNet (arXiv:2004.09297): post-norm layers whose scores have a bias by the bucket of the distance, as T5's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MPNetConfig
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.basics import check_one_input
from easytorch.layers.encoder import FirstTokenPooler, PostNormEncoder, PostNormLayer, SelfAttention
from easytorch.layers.encoder_heads import (
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
    TiedWordHead,
)
from easytorch.layers.linear import linear
from easytorch.layers.relative_bias import relative_bias
from easytorch.layers.stock_names import given_by
from easytorch.models.roberta import RobertaWords, positions_after_padding
from easytorch.protocol.native import NativeModel

ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels")
PADDING = 1  # whatever config.pad_token_id says: positions are counted from this token, as transformers counts
BUCKETS, FARTHEST = 32, 128


class MPNetEmbeddings(nn.Module):
    padding_idx = PADDING
    position_ids: torch.Tensor

    def __init__(self, config: MPNetConfig) -> None:
        super().__init__()
        positions, width = config.max_position_embeddings, config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=PADDING)
        self.position_embeddings = nn.Embedding(positions, width, padding_idx=PADDING)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.register_buffer("position_ids", torch.arange(positions)[None], persistent=False)

    def forward(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = positions_after_padding(input_ids, embeddings, PADDING)
        return self.dropout(self.LayerNorm(embeddings + self.position_embeddings(position_ids)))


class MPNetSelfAttention(SelfAttention):
    fused = ("q", "k", "v")

    def make_projections(self, hidden_size: int) -> None:
        super().make_projections(hidden_size)
        self.o = nn.Linear(hidden_size, hidden_size)

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        return linear(self.o, attended)


class MPNetAttention(nn.Module):
    def __init__(self, config: MPNetConfig, layer_idx: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.attn = MPNetSelfAttention(config, layer_idx)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.attn(hidden_states, attention_mask, **kwargs)
        return self.LayerNorm(self.dropout(attended) + hidden_states), weights


class MPNetLayer(PostNormLayer):
    attention_class = MPNetAttention


class MPNetEncoder(PostNormEncoder):
    n_heads = given_by("config.num_attention_heads")

    def __init__(self, config: MPNetConfig) -> None:
        super().__init__(config, MPNetLayer)
        if config.relative_attention_num_buckets < BUCKETS:
            raise ValueError(
                f"mpnet: config.relative_attention_num_buckets={config.relative_attention_num_buckets}; distances fall "
                f"into {BUCKETS} buckets, so it must be {BUCKETS} at least"
            )
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def positions(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The bias of the scores (1, H, T, T), the same for every layer."""
        length, table = hidden_states.shape[1], self.relative_attention_bias
        return relative_bias(table, length, length, buckets=BUCKETS, farthest=FARTHEST, device=hidden_states.device)


class MPNetPreTrainedModel(NativeModel):
    config: MPNetConfig
    config_class = MPNetConfig
    base_model_prefix = "mpnet"
    _can_record_outputs = {"hidden_states": MPNetLayer, "attentions": MPNetSelfAttention}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]  # noqa: RUF012
    optional_weights = (r"(^|\.)pooler\.",)
    head_weights = (r"^(lm_head|classifier|qa_outputs)\.",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MPNetEmbeddings):
            init.copy_(module.position_ids, torch.arange(module.position_ids.shape[-1])[None])
        if isinstance(module, TiedWordHead):
            init.zeros_(module.bias)


class MPNetModel(MPNetPreTrainedModel):
    has_pooler = True

    def __init__(self, config: MPNetConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = MPNetEmbeddings(config)
        self.encoder = MPNetEncoder(config)
        self.pooler = FirstTokenPooler(config) if add_pooling_layer else None
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
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and pooler_output (B, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding, or (B, 1, T, T) of any pattern.
        """
        check_one_input(input_ids, inputs_embeds)
        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        hidden_states = self.encoder(hidden_states, mask, **kwargs)
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class MPNetForMaskedLM(EncoderMaskedLM, MPNetPreTrainedModel):
    backbone_class = MPNetModel
    arguments = ARGUMENTS
    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def add_head(self, config: MPNetConfig) -> None:
        self.lm_head = TiedWordHead(config)

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)

    word_states = RobertaWords.word_states

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head.decoder = new_embeddings
        self.lm_head.bias = new_embeddings.bias


class MPNetForSequenceClassification(EncoderSequenceClassification, MPNetPreTrainedModel):
    backbone_class = MPNetModel
    arguments = ARGUMENTS


class MPNetForMultipleChoice(EncoderMultipleChoice, MPNetPreTrainedModel):
    backbone_class = MPNetModel
    arguments = ARGUMENTS


class MPNetForTokenClassification(EncoderTokenClassification, MPNetPreTrainedModel):
    backbone_class = MPNetModel
    arguments = ARGUMENTS


class MPNetForQuestionAnswering(EncoderQuestionAnswering, MPNetPreTrainedModel):
    backbone_class = MPNetModel
    arguments = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "start_positions", "end_positions")
