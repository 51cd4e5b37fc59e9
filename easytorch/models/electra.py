"""ELECTRA (arXiv:2003.10555): BERT's layers over embeddings of another width, trained to detect replaced tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ElectraConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput, ElectraSequenceSummary
from transformers.utils.generic import can_return_tuple

from easytorch.layers.basics import activation
from easytorch.layers.encoder import CrossAttention, PostNormEncoder, SelfAttention
from easytorch.layers.encoder_heads import (
    ClassificationHead,
    EncoderCausalLM,
    EncoderHead,
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
)
from easytorch.layers.linear import linear
from easytorch.models._bert_encoder import BertBackbone, BertEmbeddings, BertLayer, BertPreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object

SUMMARIES = ("first", "last", "mean", "cls_index")


class ElectraEmbeddings(BertEmbeddings):
    @staticmethod
    def width(config: ElectraConfig) -> int:
        return config.embedding_size


class ElectraLayer(BertLayer):
    pass


class ElectraPreTrainedModel(BertPreTrainedModel):
    config: ElectraConfig
    config_class = ElectraConfig
    base_model_prefix = "electra"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": ElectraLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }
    head_weights = (
        r"^(discriminator_predictions|generator_predictions|generator_lm_head|classifier|sequence_summary|qa_outputs)\.",
    )


class ElectraModel(BertBackbone, ElectraPreTrainedModel):
    embeddings_class = ElectraEmbeddings
    layer_class = ElectraLayer
    has_pooler = False
    output_class = BaseModelOutputWithPastAndCrossAttentions

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__(config, add_pooling_layer=False)

    def add_modules(self, config: ElectraConfig) -> None:
        self.embeddings = self.embeddings_class(config)  # type: ignore[arg-type]
        if config.embedding_size != config.hidden_size:
            self.embeddings_project = nn.Linear(config.embedding_size, config.hidden_size)
        self.encoder = PostNormEncoder(config, self.layer_class)

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        return linear(self.embeddings_project, embeddings) if hasattr(self, "embeddings_project") else embeddings


class ElectraGeneratorPredictions(nn.Module):
    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.activation = activation("gelu")
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.activation(linear(self.dense, hidden_states)))


class ElectraDiscriminatorPredictions(nn.Module):
    """(B, T, D) -> (B, T): the logit of each token being replaced."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.hidden_act)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dense_prediction(self.activation(linear(self.dense, hidden_states))).squeeze(-1)


class ElectraClassificationHead(ClassificationHead):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.activation = activation("gelu")

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x)


class ElectraWords(_Base):
    """The generator. Mixed in before the head."""

    backbone_class = ElectraModel
    _tied_weights_keys = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def add_head(self, config: ElectraConfig) -> None:
        self.generator_predictions = ElectraGeneratorPredictions(config)
        self.generator_lm_head = nn.Linear(config.embedding_size, config.vocab_size)

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.generator_lm_head, self.word_states(hidden_states))

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.generator_predictions(hidden_states)

    def get_output_embeddings(self) -> nn.Module:
        return self.generator_lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.generator_lm_head = new_embeddings


class ElectraForCausalLM(ElectraWords, EncoderCausalLM, ElectraPreTrainedModel, GenerationMixin):
    pass


class ElectraForMaskedLM(ElectraWords, EncoderMaskedLM, ElectraPreTrainedModel):
    pass


class ElectraForPreTraining(EncoderHead, ElectraPreTrainedModel):
    backbone_class = ElectraModel

    def add_head(self, config: ElectraConfig) -> None:
        self.discriminator_predictions = ElectraDiscriminatorPredictions(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ElectraForPreTrainingOutput:
        """labels (B, T): 1 for a token that was replaced, else 0. Padding, by attention_mask (B, T), does not count."""
        kwargs |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        outputs = self.encode(input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.discriminator_predictions(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            real = slice(None) if attention_mask is None else attention_mask == 1
            loss = F.binary_cross_entropy_with_logits(logits[real], labels[real].to(logits.dtype))
        return ElectraForPreTrainingOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ElectraForSequenceClassification(EncoderSequenceClassification, ElectraPreTrainedModel):
    backbone_class = ElectraModel
    head_class = ElectraClassificationHead


class ElectraForTokenClassification(EncoderTokenClassification, ElectraPreTrainedModel):
    backbone_class = ElectraModel


class ElectraForQuestionAnswering(EncoderQuestionAnswering, ElectraPreTrainedModel):
    backbone_class = ElectraModel


class ElectraForMultipleChoice(EncoderMultipleChoice, ElectraPreTrainedModel):
    backbone_class = ElectraModel

    def add_head(self, config: ElectraConfig) -> None:
        if config.summary_type not in SUMMARIES:
            raise ValueError(
                f"electra: config.summary_type={config.summary_type!r} is not carried; it takes {', '.join(SUMMARIES)}"
            )
        self.sequence_summary = ElectraSequenceSummary(config)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def score(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.sequence_summary(outputs.last_hidden_state))
