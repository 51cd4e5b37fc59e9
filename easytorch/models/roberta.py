"""RoBERTa (arXiv:1907.11692): BERT's layers, positions counted from the padding token on, and masked words alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, RobertaConfig

from easytorch.layers.encoder import CrossAttention, SelfAttention
from easytorch.layers.encoder_heads import (
    EncoderCausalLM,
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
    TiedWordHead,
)
from easytorch.models._bert_encoder import BertBackbone, BertEmbeddings, BertLayer, BertPreTrainedModel
from easytorch.models.bert import MASKED_LM_ARGUMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object


def positions_after_padding(
    input_ids: torch.Tensor | None, embeddings: torch.Tensor, padding: int, past: int | torch.Tensor = 0
) -> torch.Tensor:
    """padding + 1, padding + 2, ... (B or 1, T) for tokens, and `padding` for padding, as fairseq counts.

    Without input_ids padding is unknown, and every position counts as a token.
    """
    if input_ids is None:
        return (torch.arange(embeddings.shape[1], device=embeddings.device) + past + padding + 1)[None]
    tokens = input_ids.ne(padding).long()
    return (torch.cumsum(tokens, dim=1) + past) * tokens + padding


class RobertaEmbeddings(BertEmbeddings):
    def __init__(self, config: Any) -> None:
        if config.pad_token_id is None:
            raise ValueError(
                f"{config.model_type}: config.pad_token_id is None; positions are counted from it, so give the "
                f"number of the padding token"
            )
        if config.pad_token_id >= config.max_position_embeddings:
            raise ValueError(
                f"{config.model_type}: config.pad_token_id={config.pad_token_id} is not among the "
                f"config.max_position_embeddings={config.max_position_embeddings} positions, which are counted from it"
            )
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, config.hidden_size, padding_idx=self.padding_idx
        )

    def add_positions(self, config: Any, width: int) -> None:
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)

    def default_positions(
        self, input_ids: torch.Tensor | None, embeddings: torch.Tensor, past: int | torch.Tensor
    ) -> torch.Tensor:
        return positions_after_padding(input_ids, embeddings, self.padding_idx, past)


class RobertaLayer(BertLayer):
    pass


class RobertaPreTrainedModel(BertPreTrainedModel):
    config: RobertaConfig
    config_class = RobertaConfig
    base_model_prefix = "roberta"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": RobertaLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }
    head_weights = (r"^(lm_head|classifier|qa_outputs)\.",)


class RobertaModel(BertBackbone, RobertaPreTrainedModel):
    embeddings_class = RobertaEmbeddings
    layer_class = RobertaLayer
    _no_split_modules = ["RobertaEmbeddings", "RobertaLayer"]  # noqa: RUF012


class RobertaWords(_Base):
    """A RoBERTa whose `lm_head` is tied to its embedding. Mixed in before the head."""

    backbone_class: ClassVar[type[Any]] = RobertaModel
    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def add_head(self, config: Any) -> None:
        self.lm_head = TiedWordHead(config)

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.transformed(hidden_states)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head.decoder = new_embeddings
        self.lm_head.bias = new_embeddings.bias


class RobertaForCausalLM(RobertaWords, EncoderCausalLM, RobertaPreTrainedModel, GenerationMixin):
    pass


class RobertaForMaskedLM(RobertaWords, EncoderMaskedLM, RobertaPreTrainedModel):
    arguments = MASKED_LM_ARGUMENTS


class RobertaForSequenceClassification(EncoderSequenceClassification, RobertaPreTrainedModel):
    backbone_class = RobertaModel


class RobertaForMultipleChoice(EncoderMultipleChoice, RobertaPreTrainedModel):
    backbone_class = RobertaModel
    arguments = ("input_ids", "token_type_ids", "attention_mask", "labels", "position_ids", "inputs_embeds")


class RobertaForTokenClassification(EncoderTokenClassification, RobertaPreTrainedModel):
    backbone_class = RobertaModel


class RobertaForQuestionAnswering(EncoderQuestionAnswering, RobertaPreTrainedModel):
    backbone_class = RobertaModel
