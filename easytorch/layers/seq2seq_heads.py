"""The heads of encoder-decoder families: language modeling, sequence classification, question answering.

Each calls `encode_decode`, the model's own (layers/seq2seq.py) or that of its base model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache
from transformers.loss.loss_utils import ForQuestionAnsweringLoss, ForSequenceClassificationLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import cache_keyword, cache_of, takes_cache
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.linear import linear
from easytorch.layers.word_loss import fused_loss_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # what has `encode_decode`, and the family's `PreTrainedModel`, come after it among the bases


def of_both(outputs: Seq2SeqModelOutput) -> dict[str, Any]:
    """The fields of encoder and decoder outputs that every head passes on."""
    return {name: value for name, value in outputs.items() if name != "last_hidden_state"}


def decoder_output(
    outputs: Any, head: nn.Module, hidden_states: torch.Tensor, labels: torch.Tensor | None
) -> CausalLMOutputWithCrossAttentions:
    """The output of a decoder alone. head: of hidden_states (B, T, D); labels (B, T): the next token of each, not
    shifted. In training the loss of a large vocabulary is computed without the logits."""
    output_class: Any = CausalLMOutputWithCrossAttentions
    logits: Any = None
    loss = None if labels is None else fused_loss_of(head, hidden_states, labels)
    if loss is not None:
        logits, output_class = DeferredLogits(lambda: linear(head, hidden_states)), deferring(output_class)
    else:
        logits = linear(head, hidden_states)
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().to(logits.device))
    made: CausalLMOutputWithCrossAttentions = output_class(
        loss=loss,
        logits=logits,
        **cache_keyword(cache_of(outputs)),
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        cross_attentions=outputs.cross_attentions,
    )
    return made


class Seq2SeqLMHead(_Base):
    """Logits of the next token of the decoder. `GenerationMixin` comes after it among the bases."""

    caches_labels: ClassVar[bool] = False  # whether a call with labels fills a cache too
    encode_decode: Any
    shifted: Any

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.shifted(labels)
        return read

    def enter_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D): the head's input from the decoder's last hidden states."""
        return hidden_states

    def logits_bias(self) -> torch.Tensor | None:
        """(1, vocabulary), added to the logits; a buffer, not trained."""
        return None

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, vocabulary)"""
        logits, bias = linear(self.get_output_embeddings(), hidden_states), self.logits_bias()
        return logits if bias is None else logits + bias.to(logits.device)

    def fused_loss(self, hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """The loss computed without materializing the logits; None where it needs them."""
        if not self.training:
            return None
        return fused_loss_of(self.get_output_embeddings(), hidden_states, labels, self.logits_bias())

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """As `encode_decode`, and logits (B, T, vocabulary).

        labels (B, T): the decoder's target tokens, -100 where ignored; without decoder inputs the labels shifted right
        are its input. In training the loss of a large vocabulary is computed without the logits, which are computed
        if they are read.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.encode_decode(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None or self.caches_labels else False,
            **kwargs,
        )
        return self.language_output(outputs, labels)

    def language_output(self, outputs: Any, labels: torch.Tensor | None) -> Seq2SeqLMOutput:
        """Loss and logits of the decoder's states."""
        hidden_states = self.enter_head(outputs.last_hidden_state)
        loss = None if labels is None else self.fused_loss(hidden_states, labels)
        if loss is not None:
            deferred: Any = DeferredLogits(lambda: self.logits_of(hidden_states))
            output_class: Any = deferring(Seq2SeqLMOutput)
            made: Seq2SeqLMOutput = output_class(loss=loss, logits=deferred, **of_both(outputs))
            return made
        logits = self.logits_of(hidden_states)
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().to(logits.device))
        return Seq2SeqLMOutput(loss=loss, logits=logits, **of_both(outputs))


class SentenceHead(nn.Module):
    """out(dropout(tanh(dense(dropout(x))))): (B, D) -> (B, labels)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.d_model, config.num_labels)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = torch.tanh(linear(self.dense, self.dropout(hidden_states)))
        return linear(self.out_proj, self.dropout(hidden_states))


def at_last_end(hidden_states: torch.Tensor, input_ids: torch.Tensor, end: int) -> torch.Tensor:
    """(B, T, D) -> (B, D): the state at the last `end` token of each row; every row must have as many of them."""
    if input_ids.shape[1] != hidden_states.shape[1]:
        raise ValueError(
            f"the decoder reads {hidden_states.shape[1]} tokens and the encoder {input_ids.shape[1]}: the end tokens "
            f"of input_ids are looked for in the decoder's states, so both must read as many"
        )
    ends = (input_ids == end).to(hidden_states.device)
    counts = ends.sum(1)
    if not (torch.compiler.is_compiling() or torch.compiler.is_exporting()):
        if bool((counts != counts[0]).any()):
            raise ValueError("All examples must have the same number of <eos> tokens.")
        if not bool(counts[0]):
            raise ValueError(f"Each example must contain at least one <eos> token: a row has no token {end}")
    last = (ends * torch.arange(1, ends.shape[1] + 1, device=ends.device)).argmax(1)
    return hidden_states[torch.arange(ends.shape[0], device=ends.device), last]


class Seq2SeqSequenceClassification(_Base):
    """Logits of each sequence, of the decoder's state at its last end token."""

    encode_decode: Any
    classification_head: nn.Module

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqSequenceClassifierOutput:
        """input_ids (B, T) -> logits (B, labels). labels: class indices (B,), or floats (B, num_labels) or (B,)."""
        if input_ids is None:
            raise NotImplementedError(
                f"{type(self).__name__} looks for end tokens in input_ids, and takes no inputs_embeds in their place"
            )
        outputs = self.encode_decode(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        sentence = at_last_end(outputs.last_hidden_state, input_ids, self.config.eos_token_id)
        logits = self.classification_head(sentence)
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, logits, self.config)
        return Seq2SeqSequenceClassifierOutput(loss=loss, logits=logits, **of_both(outputs))


class Seq2SeqQuestionAnswering(_Base):
    """Logits of where the answer starts and ends, in what the decoder reads."""

    encode_decode: Any
    qa_outputs: nn.Linear

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        """start_logits and end_logits (B, T). start_positions and end_positions (B,); beyond T: ignored."""
        asked = start_positions is not None and end_positions is not None
        outputs = self.encode_decode(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if asked else use_cache,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).split(1, dim=-1)
        start_logits, end_logits = start_logits.squeeze(-1).contiguous(), end_logits.squeeze(-1).contiguous()
        loss = None
        if asked:
            loss = ForQuestionAnsweringLoss(start_logits, end_logits, start_positions, end_positions)
        return Seq2SeqQuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **of_both(outputs)
        )
