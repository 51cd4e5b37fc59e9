"""mT5 (arXiv:2010.11934): T5 1.1 of a hundred languages; the states that logits are made of are never scaled."""

from __future__ import annotations

import torch
from transformers import GenerationMixin, MT5Config
from transformers.utils.output_capturing import OutputRecorder

from easytorch.models._t5_blocks import T5Block, T5LayerCrossAttention, T5LayerSelfAttention
from easytorch.models.t5 import (
    T5ClassificationHead,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
    T5PreTrainedModel,
    T5Stack,
)


class MT5Block(T5Block):
    pass


class MT5ClassificationHead(T5ClassificationHead):
    pass


class MT5PreTrainedModel(T5PreTrainedModel):
    config: MT5Config
    config_class = MT5Config
    _no_split_modules = ["MT5Block"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(MT5Block, index=0),
        "attentions": OutputRecorder(T5LayerSelfAttention, index=-1),
        "cross_attentions": OutputRecorder(T5LayerCrossAttention, index=-1),
    }


class MT5Stack(MT5PreTrainedModel, T5Stack):
    block_class = MT5Block


class MT5Model(MT5PreTrainedModel, T5Model):
    model_type = "mt5"
    stack_class = MT5Stack


class MT5ForConditionalGeneration(MT5PreTrainedModel, T5ForConditionalGeneration, GenerationMixin):
    model_type = "mt5"
    stack_class = MT5Stack

    def enter_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class MT5EncoderModel(MT5PreTrainedModel, T5EncoderModel):
    model_type = "mt5"
    stack_class = MT5Stack


class MT5ForSequenceClassification(MT5PreTrainedModel, T5ForSequenceClassification):
    model_class = MT5Model
    head_class = MT5ClassificationHead


class MT5ForTokenClassification(MT5PreTrainedModel, T5ForTokenClassification):
    backbone_class = MT5EncoderModel


class MT5ForQuestionAnswering(MT5PreTrainedModel, T5ForQuestionAnswering):
    stack_class = MT5Stack
