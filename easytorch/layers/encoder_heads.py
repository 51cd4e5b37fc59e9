"""The heads encoder families share: words, classes of sequences and tokens, choices, answers.

Each is mixed in before the family's `PreTrainedModel`, names its backbone (`backbone_class = RobertaModel`) and
overrides the step where the family differs: `add_head`, and what makes logits of the backbone's outputs.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import CACHE, cache_keyword, cache_of, takes_cache
from easytorch.layers.arguments import in_order
from easytorch.layers.basics import check_one_input, keep_logits
from easytorch.layers.causal_loss import plain_parameters, shifted_by_one
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.linear import linear
from easytorch.layers.word_loss import fused_word_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind the head in the bases

logger = logging.getLogger(__name__)


def classifier_dropout(config: Any) -> nn.Dropout:
    """`config.classifier_dropout`, else the rate of the hidden states."""
    rate = getattr(config, "classifier_dropout", None)
    return nn.Dropout(config.hidden_dropout_prob if rate is None else rate)


class TiedWordHead(nn.Module):
    """Logits of words (B, T, vocabulary) from the product with the embedding, which is the decoder, and a bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.add_transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def add_transform(self, config: Any) -> None:
        """The modules that `transformed` calls, under the names of transformers."""
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def transformed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.layer_norm(F.gelu(linear(self.dense, hidden_states)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.decoder, self.transformed(hidden_states))


class ClassificationHead(nn.Module):
    """out(dropout(act(dense(dropout(x of the first token))))): (B, T, D) -> (B, labels)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = classifier_dropout(config)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first = self.dropout(hidden_states[:, 0])
        return linear(self.out_proj, self.dropout(self.act(linear(self.dense, first))))


class EncoderHead(_Base):
    """A backbone and the head on it.

    arguments: those of `forward`, in the order of transformers. pooled: whether the backbone has its pooler, in
    families that have one. head_first: whether the head's weights come before the backbone's; optimizer states follow.
    """

    backbone_class: ClassVar[type[Any]]
    arguments: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
        "labels",
    )
    pooled: ClassVar[bool] = False
    head_first: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "forward" in own or not ("backbone_class" in own or "arguments" in own):
            return  # a forward of its own, or one that is in order already
        if list(inspect.signature(cls.forward).parameters)[1:-1] != list(cls.arguments):
            cls.forward = in_order(cls.forward, cls.arguments)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        steps = (self.add_backbone, self.add_head)
        for step in reversed(steps) if self.head_first else steps:
            step(config)
        self.post_init()

    def add_backbone(self, config: Any) -> None:
        """The backbone, under the name that checkpoints have for it."""
        more = {"add_pooling_layer": self.pooled} if self.backbone_class.has_pooler else {}
        setattr(self, self.base_model_prefix, self.backbone_class(config, **more))

    def add_head(self, config: Any) -> None:
        """The modules of the head, under the names of transformers."""
        raise NotImplementedError

    def encode(self, input_ids: torch.Tensor | None, **inputs: Any) -> Any:
        """The backbone's outputs. An input that is None is not passed on: not every family has it."""
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.base_model(input_ids, return_dict=True, **given)


class WordsHead(EncoderHead):
    """A head of logits of words."""

    def words(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, vocabulary)"""
        raise NotImplementedError

    def word_states(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """What the matrix of the words multiplies (layers/word_loss.py)."""
        return None

    def word_parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return plain_parameters(self.get_output_embeddings())


class EncoderMaskedLM(WordsHead):
    """Logits of the word at every position. A family with another `loss_of` overrides `fused_loss` too.

    In training the loss of a large vocabulary is computed without the logits, which are computed if they are read.
    """

    def predicted(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states (..., D) that logits are made of, and their labels."""
        return hidden_states, labels

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def fused_loss(self, hidden_states: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        """`loss_of` the states' words, without their logits; None where it needs them."""
        return fused_word_loss(self, hidden_states, labels)

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
    ) -> MaskedLMOutput:
        """labels (B, T), -100 where no loss is taken."""
        outputs = self.encode(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        hidden_states, labels = self.predicted(outputs.last_hidden_state, labels)
        of_both = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        loss = None if labels is None else self.fused_loss(hidden_states, labels, **kwargs)
        if loss is not None:
            deferred: Any = DeferredLogits(lambda: self.words(hidden_states))
            output_class: Any = deferring(MaskedLMOutput)
            made: MaskedLMOutput = output_class(loss=loss, logits=deferred, **of_both)
            return made
        logits = self.words(hidden_states)
        loss = None if labels is None else self.loss_of(logits, labels, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, **of_both)


class EncoderCausalLM(WordsHead):
    """Logits of the next word, of an encoder that runs as a decoder. `words` and `GenerationMixin` stand beside it."""

    arguments = (
        *EncoderHead.arguments[:-1],
        "encoder_hidden_states",
        "encoder_attention_mask",
        "labels",
        CACHE,
        "use_cache",
        "logits_to_keep",
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.is_decoder:
            logger.warning(
                "%s sees the future: add is_decoder=True to the config to use it by itself", type(self).__name__
            )

    @takes_cache
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
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """labels (B, T): the tokens themselves, -100 where no loss is taken; the shift by one is done here."""
        outputs = self.encode(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        kept = keep_logits(outputs.last_hidden_state, logits_to_keep)
        output_class: Any = CausalLMOutputWithCrossAttentions
        loss = None
        logits: Any = None
        every = (
            isinstance(logits_to_keep, int)
            and not logits_to_keep
            and not {"shift_labels", "ignore_index"} & set(kwargs)
        )
        if labels is not None and every and self.loss_function is ForCausalLMLoss:
            loss = fused_word_loss(self, kept, shifted_by_one(labels), **kwargs)
        if loss is not None:
            logits, output_class = DeferredLogits(lambda: self.words(kept)), deferring(output_class)
        else:
            logits = self.words(kept)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return output_class(
            loss=loss,
            logits=logits,
            **cache_keyword(cache_of(outputs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class EncoderSequenceClassification(EncoderHead):
    """Logits of each sequence, by `ClassificationHead` unless a family says otherwise."""

    head_class: ClassVar[type[nn.Module]] = ClassificationHead

    def add_head(self, config: Any) -> None:
        self.classifier = self.head_class(config)

    def classify(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The backbone's outputs -> (B, num_labels)"""
        return self.classifier(outputs.last_hidden_state)

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)

    def with_labels(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The logits (B, num_labels) as the loss of `labels` is computed of them, and as they are then returned."""
        return logits

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
        outputs = self.encode(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classify(outputs, attention_mask)
        logits = logits if labels is None else self.with_labels(logits, labels)
        return SequenceClassifierOutput(
            loss=None if labels is None else self.loss_of(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class EncoderMultipleChoice(EncoderHead):
    """A score of each choice, and the choices of a row against each other."""

    pooled = True

    def add_head(self, config: Any) -> None:
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def score(self, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The backbone's outputs -> (B * choices, 1)"""
        return self.classifier(self.dropout(outputs.pooler_output))

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
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None, "check_one_input says so"
        choices = given.shape[1]
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ids, mask, types, positions, embeds = (None if one is None else one.flatten(0, 1) for one in inputs)
        outputs = self.encode(
            ids,
            attention_mask=mask,
            token_type_ids=types,
            position_ids=positions,
            inputs_embeds=embeds,
            **kwargs,
        )
        logits = self.score(outputs, mask).view(-1, choices)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else F.cross_entropy(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class EncoderTokenClassification(EncoderHead):
    """Logits of every token."""

    def add_head(self, config: Any) -> None:
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def classify(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, num_labels)"""
        return self.classifier(self.dropout(hidden_states))

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
        outputs = self.encode(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classify(outputs.last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class EncoderQuestionAnswering(EncoderHead):
    """Logits of where the answer starts and ends."""

    arguments = (*EncoderHead.arguments[:-1], "start_positions", "end_positions")

    def add_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)

    def answer(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, 2)"""
        return self.qa_outputs(hidden_states)

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
        outputs = self.encode(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        start_logits, end_logits = self.answer(outputs.last_hidden_state).unbind(-1)
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
