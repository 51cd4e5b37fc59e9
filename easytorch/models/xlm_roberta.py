"""XLM-RoBERTa (arXiv:1911.02116): RoBERTa in a hundred languages; its heads precede its layers in a checkpoint."""

from __future__ import annotations

from transformers import GenerationMixin, XLMRobertaConfig

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


class XLMRobertaEmbeddings(RobertaEmbeddings):
    pass


class XLMRobertaLayer(RobertaLayer):
    pass


class XLMRobertaPreTrainedModel(RobertaPreTrainedModel):
    config: XLMRobertaConfig
    config_class = XLMRobertaConfig
    head_first = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": XLMRobertaLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }


class XLMRobertaModel(XLMRobertaPreTrainedModel, RobertaModel):
    embeddings_class = XLMRobertaEmbeddings
    layer_class = XLMRobertaLayer
    _no_split_modules = ["XLMRobertaEmbeddings", "XLMRobertaLayer"]  # noqa: RUF012


class XLMRobertaForCausalLM(XLMRobertaPreTrainedModel, RobertaForCausalLM, GenerationMixin):
    backbone_class = XLMRobertaModel


class XLMRobertaForMaskedLM(XLMRobertaPreTrainedModel, RobertaForMaskedLM):
    backbone_class = XLMRobertaModel


class XLMRobertaForSequenceClassification(XLMRobertaPreTrainedModel, RobertaForSequenceClassification):
    backbone_class = XLMRobertaModel


class XLMRobertaForMultipleChoice(XLMRobertaPreTrainedModel, RobertaForMultipleChoice):
    backbone_class = XLMRobertaModel


class XLMRobertaForTokenClassification(XLMRobertaPreTrainedModel, RobertaForTokenClassification):
    backbone_class = XLMRobertaModel


class XLMRobertaForQuestionAnswering(XLMRobertaPreTrainedModel, RobertaForQuestionAnswering):
    backbone_class = XLMRobertaModel
