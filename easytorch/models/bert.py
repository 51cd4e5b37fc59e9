"""BERT (arXiv:1810.04805): post-norm layers, learned positions, masked words and next sentence prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, GenerationMixin
from transformers.modeling_outputs import NextSentencePredictorOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from easytorch.layers.basics import activation
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.encoder_heads import (
    EncoderCausalLM,
    EncoderHead,
    EncoderMaskedLM,
    EncoderMultipleChoice,
    EncoderQuestionAnswering,
    EncoderSequenceClassification,
    EncoderTokenClassification,
    TiedWordHead,
    WordsHead,
    classifier_dropout,
)
from easytorch.layers.heads import labels_of
from easytorch.layers.linear import linear
from easytorch.layers.word_loss import fused_word_loss
from easytorch.models._bert_encoder import BertModel as BertModel
from easytorch.models._bert_encoder import BertPreTrainedModel
from easytorch.models._bert_rules import RULES as RULES

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object

# transformers' masked language models take these two by position before the labels.
MASKED_LM_ARGUMENTS = (
    *EncoderHead.arguments[:-1],
    "encoder_hidden_states",
    "encoder_attention_mask",
    "labels",
)


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.transform_act_fn(linear(self.dense, hidden_states)))


class BertLMPredictionHead(TiedWordHead):
    def add_transform(self, config: BertConfig) -> None:
        self.transform = BertPredictionHeadTransform(config)

    def transformed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.transform(hidden_states)


class BertHeads(nn.Module):
    """`cls` on disk: word predictions, next sentence prediction, or both."""

    def __init__(self, config: BertConfig, *, words: bool, sentence: bool) -> None:
        super().__init__()
        if words:
            self.predictions = BertLMPredictionHead(config)
        if sentence:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(
        self, hidden_states: torch.Tensor, pooled: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, T, D) -> word logits, (B, D) -> next sentence logits: of the heads that there are."""
        if not hasattr(self, "predictions"):
            return self.seq_relationship(hidden_states)
        words = self.predictions(hidden_states)
        return (words, self.seq_relationship(pooled)) if hasattr(self, "seq_relationship") else words


class BertWords(_Base):
    """A BERT whose `cls.predictions` is tied to its embedding. Mixed in before the head."""

    backbone_class = BertModel
    # The decoder's matrix is the word embedding; its bias is its own.
    _tied_weights_keys = {  # noqa: RUF012
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def add_head(self, config: BertConfig) -> None:
        self.cls = BertHeads(config, words=True, sentence=self.pooled)  # type: ignore[arg-type]

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.cls(hidden_states)

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.cls.predictions.transformed(hidden_states)

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.cls.predictions.decoder = new_embeddings  # type: ignore[assignment]
        self.cls.predictions.bias = new_embeddings.bias  # type: ignore[assignment]


class BertForPreTraining(BertWords, WordsHead, BertPreTrainedModel):
    pooled = True

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.cls.predictions(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BertForPreTrainingOutput:
        """labels (B, T), -100 where no loss is taken; next_sentence_label (B,), 0 for a true continuation.

        In training the loss of a large vocabulary is computed without the logits of words, which are computed if they
        are read.
        """
        kwargs |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        outputs = self.encode(input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)
        hidden_states, loss = outputs.last_hidden_state, None
        output_class: Any = BertForPreTrainingOutput
        words: Any = None
        asked = None if labels is None or next_sentence_label is None else (labels, next_sentence_label)
        if asked is not None:
            loss = fused_word_loss(self, hidden_states, asked[0])
        if loss is not None:
            words = DeferredLogits(lambda: self.words(hidden_states))
            output_class = deferring(output_class, "prediction_logits")
            sentence = self.cls.seq_relationship(outputs.pooler_output)
        else:
            words, sentence = self.cls(hidden_states, outputs.pooler_output)
            if asked is not None:
                loss = F.cross_entropy(words.flatten(0, 1), asked[0].flatten())
        if asked is not None and loss is not None:
            loss = loss + F.cross_entropy(sentence, asked[1].flatten())
        return output_class(
            loss=loss,
            prediction_logits=words,
            seq_relationship_logits=sentence,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertLMHeadModel(BertWords, EncoderCausalLM, BertPreTrainedModel, GenerationMixin):
    pass


class BertForMaskedLM(BertWords, EncoderMaskedLM, BertPreTrainedModel):
    arguments = MASKED_LM_ARGUMENTS


class BertForNextSentencePrediction(EncoderHead, BertPreTrainedModel):
    backbone_class = BertModel
    pooled = True

    def add_head(self, config: BertConfig) -> None:
        self.cls = BertHeads(config, words=False, sentence=True)

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
    ) -> NextSentencePredictorOutput:
        """labels (B,): 0 where the second sentence continues the first, 1 where it is a random one."""
        kwargs |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        outputs = self.encode(input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.cls(outputs.pooler_output)
        loss = None if labels is None else F.cross_entropy(logits, labels.flatten())
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForSequenceClassification(EncoderSequenceClassification, BertPreTrainedModel):
    backbone_class = BertModel
    pooled = True

    def add_head(self, config: BertConfig) -> None:
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, labels_of(config))

    def classify(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class BertForMultipleChoice(EncoderMultipleChoice, BertPreTrainedModel):
    backbone_class = BertModel

    def add_head(self, config: BertConfig) -> None:
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)


class BertForTokenClassification(EncoderTokenClassification, BertPreTrainedModel):
    backbone_class = BertModel


class BertForQuestionAnswering(EncoderQuestionAnswering, BertPreTrainedModel):
    backbone_class = BertModel
