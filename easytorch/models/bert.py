"""BERT (arXiv:1810.04805): its weight rules and its heads; the model under them is in _bert_encoder.py."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from easytorch.layers.basics import activation, check_one_input, keep_logits
from easytorch.layers.linear import linear
from easytorch.models._bert_encoder import BertModel, BertPreTrainedModel
from easytorch.models._bert_rules import RULES as RULES

logger = logging.getLogger(__name__)

# The decoder is the word embedding read backwards, with a bias of its own.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.transform_act_fn(linear(self.dense, hidden_states)))


class BertLMPredictionHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.decoder, self.transform(hidden_states))


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
        """(B, T, D) -> word logits; with both heads also (B, D) -> sentence logits; (B, D) alone where that is all."""
        if not hasattr(self, "predictions"):
            return self.seq_relationship(hidden_states)
        words = self.predictions(hidden_states)
        return (words, self.seq_relationship(pooled)) if hasattr(self, "seq_relationship") else words


class BertWordPredictor(BertPreTrainedModel):
    """A BERT whose `cls.predictions` is tied to its embedding."""

    _tied_weights_keys = TIED

    def __init__(self, config: BertConfig, *, sentence: bool = False) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=sentence)
        self.cls = BertHeads(config, words=True, sentence=sentence)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BertLMPredictionHead):
            init.zeros_(module.bias)


class BertForPreTraining(BertWordPredictor):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, sentence=True)

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
        """labels (B, T), -100 where no loss is taken; next_sentence_label (B,), 0 for a true continuation."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        words, sentence = self.cls(outputs.last_hidden_state, outputs.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = F.cross_entropy(words.flatten(0, 1), labels.flatten())
            loss = loss + F.cross_entropy(sentence, next_sentence_label.flatten())
        return BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=words,
            seq_relationship_logits=sentence,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class BertLMHeadModel(BertWordPredictor, GenerationMixin):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        if not config.is_decoder:
            logger.warning("BertLMHeadModel sees the future: add is_decoder=True to the config to use it by itself")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """labels (B, T): the tokens themselves, -100 where no loss is taken; the shift by one is done here."""
        outputs = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=False if labels is not None else use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.cls(keep_logits(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class BertForMaskedLM(BertWordPredictor):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        if config.is_decoder:
            logger.warning("BertForMaskedLM reads both ways: set is_decoder=False in the config")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """labels (B, T), -100 where no loss is taken."""
        outputs = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            return_dict=True,
            **kwargs,
        )
        logits = self.cls(outputs.last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForNextSentencePrediction(BertPreTrainedModel):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertHeads(config, words=False, sentence=True)
        self.post_init()

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
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.cls(outputs.pooler_output)
        loss = None if labels is None else F.cross_entropy(logits, labels.flatten())
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertClassifier(BertPreTrainedModel):
    """A BERT with `classifier`: one linear layer after dropout."""

    def __init__(self, config: BertConfig, *, pooled: bool, num_labels: int) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=pooled)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self.post_init()


class BertForSequenceClassification(BertClassifier):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=True, num_labels=config.num_labels)

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
    ) -> SequenceClassifierOutput:
        """labels: class indices (B,), or floats (B, num_labels) or (B,); `config.problem_type` says, or they do."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForMultipleChoice(BertClassifier):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=True, num_labels=1)

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
    ) -> MultipleChoiceModelOutput:
        """Every input (B, choices, T, ...) -> logits (B, choices). labels (B,): the right choice."""
        check_one_input(input_ids, inputs_embeds)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        choices = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        flat = (None if tensor is None else tensor.flatten(0, 1) for tensor in inputs)
        outputs = self.bert(*flat, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForTokenClassification(BertClassifier):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=False, num_labels=config.num_labels)

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
    ) -> TokenClassifierOutput:
        """labels (B, T), -100 where no loss is taken."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BertForQuestionAnswering(BertPreTrainedModel):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """start_logits and end_logits (B, T). start_positions and end_positions (B,); beyond T: ignored."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
