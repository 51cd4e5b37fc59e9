"""CamemBERT (arXiv:1911.03894): RoBERTa in French; its heads precede its layers in a checkpoint."""

from __future__ import annotations

from transformers import CamembertConfig, GenerationMixin

from easytorch.layers.encoder import CrossAttention, SelfAttention
from easytorch.models.roberta import (
    RobertaEmbeddings,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaLayer,
    RobertaModel,
    RobertaPreTrainedModel,
)


class CamembertEmbeddings(RobertaEmbeddings):
    pass


class CamembertLayer(RobertaLayer):
    pass


class CamembertPreTrainedModel(RobertaPreTrainedModel):
    config: CamembertConfig
    config_class = CamembertConfig
    head_first = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": CamembertLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }


class CamembertModel(CamembertPreTrainedModel, RobertaModel):
    embeddings_class = CamembertEmbeddings
    layer_class = CamembertLayer
    _no_split_modules = ["CamembertEmbeddings", "CamembertLayer"]  # noqa: RUF012


class CamembertForCausalLM(CamembertPreTrainedModel, RobertaForCausalLM, GenerationMixin):
    backbone_class = CamembertModel


class CamembertForMaskedLM(CamembertPreTrainedModel, RobertaForMaskedLM):
    backbone_class = CamembertModel


class CamembertForSequenceClassification(CamembertPreTrainedModel, RobertaForSequenceClassification):
    backbone_class = CamembertModel


class CamembertForMultipleChoice(CamembertPreTrainedModel, RobertaForMultipleChoice):
    backbone_class = CamembertModel


class CamembertForTokenClassification(CamembertPreTrainedModel, RobertaForTokenClassification):
    backbone_class = CamembertModel


class CamembertForQuestionAnswering(CamembertPreTrainedModel, RobertaForQuestionAnswering):
    backbone_class = CamembertModel
