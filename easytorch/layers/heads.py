"""The heads decoder families share: language modeling, sequence and token classification, question answering.

Each is mixed in before the family's `PreTrainedModel`, which names its backbone: `backbone_class = LlamaModel`. The
attribute that holds it is `base_model_prefix`, as on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import cache_keyword, cache_of, takes_cache
from easytorch.layers import sequence_parallel, tied_embedding
from easytorch.layers.basics import keep_logits
from easytorch.layers.causal_loss import causal_lm_loss, plain_parameters
from easytorch.layers.deferred_logits import DeferredLogits, deferring, defers
from easytorch.layers.linear import argmax, linear, watched
from easytorch.layers.vocabulary_parallel import sharded_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases

logger = logging.getLogger(__name__)

# Fields of a backbone's output that a head passes on where they are there.
_OF_BACKBONES = (
    "cross_attentions", "router_logits", "shared_kv_states", "image_hidden_states", "audio_hidden_states",
    "image_outputs", "video_outputs", "audio_outputs",
)  # fmt: skip


def width_of(config: PreTrainedConfig) -> int:
    """The width of a backbone's output: hidden_size, or word_embed_proj_dim (OPT)."""
    config = text_config_of(config)
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


def text_config_of(config: PreTrainedConfig) -> Any:
    """The config of the decoder: that inside the config of a model of images and text, else `config` itself."""
    return getattr(config, "text_config", None) or config


def labels_of(config: PreTrainedConfig) -> int:
    """`config.num_labels`, which every config has when it is made."""
    assert config.num_labels is not None
    return config.num_labels


def _owner(owner: type, name: str) -> type:
    """The class in `owner`'s MRO that defines `name`."""
    return next(one for one in owner.__mro__ if name in vars(one))


class FusedLoss(_Base):
    """The loss of an `lm_head` without its logits. A family that changes logits overrides both `finish_logits` and
    `logits_finish`."""

    lm_head: Any

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Hook between the lm_head and the loss: logits (B, T, vocabulary) -> the same shape."""
        return logits

    def logits_finish(self) -> tuple[float, float | None]:
        """`finish_logits` of the same class as a factor and a soft cap after it; None for no cap."""
        return 1.0, None

    def fused_loss(self, hidden_states: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        """transformers' loss of causal language models, of hidden states (B, T, D), without their logits.

        None where it needs the logits, because they are changed first or the head has hooks; or where they are few.
        """
        if self.loss_function is not ForCausalLMLoss:
            return None
        if _owner(type(self), "finish_logits") is not _owner(type(self), "logits_finish"):
            return None
        weight, bias = sharded_parameters(self.lm_head)
        if weight is None:  # else the logits of all ranks would be gathered, in evaluation too
            weight, bias = plain_parameters(self.lm_head)
            if weight is None or hidden_states.dtype is not weight.dtype:
                return None
            if not self.training or not defers(hidden_states, weight):
                return None
            weight = tied_embedding.of_head(weight)
        scale, softcap = self.logits_finish()
        hidden_states = hidden_states if scale == 1.0 else hidden_states * scale
        return causal_lm_loss(hidden_states, weight, labels, bias, softcap=softcap, **kwargs)


class CausalLMHead(FusedLoss):
    """Logits of the next token, at every requested position. `GenerationMixin` comes after it among the bases."""

    backbone_class: ClassVar[type[nn.Module]]
    lm_head_bias: ClassVar[bool] = False
    backbone_arguments: ClassVar[tuple[str, ...]] = ()  # those of the backbone alone, which no loss is given
    backbone_name: ClassVar[str | None] = None  # the attribute that holds it, if not `base_model_prefix`
    backbone_keeps: ClassVar[bool] = False  # it takes `logits_to_keep`, and may leave the others out
    output_class: ClassVar[type[ModelOutput]] = CausalLMOutputWithPast
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan: dict[str, str] | None = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan: dict[str, Any] | None = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan: dict[str, str] | None = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        setattr(self, self.backbone_name or self.base_model_prefix, self.backbone_class(config))
        self.vocab_size = text_config_of(config).vocab_size
        self.lm_head = nn.Linear(width_of(config), self.vocab_size, bias=self.lm_head_bias)
        self.post_init()

    def stage_refusal(self) -> str | None:
        """Why the layers cannot be divided into stages of a pipeline; None where they can."""
        from easytorch.layers.stages import stage_refusal

        return stage_refusal(self)

    def keep_layers(self, first: int, last: int) -> None:
        """Become the stage of a pipeline that has the layers `first` to `last` (exclusive); see `layers.stages`."""
        from easytorch.layers.stages import keep_layers

        keep_layers(self, first, last)

    def restore_layers(self, state: Mapping[str, torch.Tensor]) -> None:
        """Undo `keep_layers`, with the values that `state`, the whole model's state dict, has for what was left out."""
        from easytorch.layers.stages import restore_layers

        restore_layers(self, state)

    def left_out_names(self) -> list[str]:
        """The names in the state dict of what other stages have."""
        from easytorch.layers.stages import left_out_names

        return left_out_names(self)

    def sequence_refusal(self) -> str | None:
        """Why the ranks of a mesh cannot each compute their own tokens of a sequence; None where they can."""
        backbone: Any = self.base_model
        if not hasattr(backbone, "sequence_refusal"):
            return f"{type(backbone).__name__} is more than a decoder of tokens"
        found: str | None = backbone.sequence_refusal()
        return found

    def shard_sequence(self, mesh: Any) -> None:
        """Compute this rank's tokens of each sequence; mesh: of the one axis "sp". `shard_model` calls it."""
        sequence_parallel.divide(self, mesh)

    def gather_sequence(self) -> None:
        """Undo `shard_sequence`, if it was done. `gather_model` calls it."""
        sequence_parallel.gather(self)

    def likeliest_token(self, **inputs: Any) -> torch.Tensor | None:
        """The argmax (B,) of the last position's logits, which are not materialized; inputs as for a call.

        None where a call does more: the logits are changed first, or a hook sees them.
        """
        kind, forward = type(self), type(self).forward
        if forward is not CausalLMHead.forward:  # but for the order of its arguments
            forward = getattr(forward, "__wrapped__", forward)
        if kind.finish_logits is not CausalLMHead.finish_logits or forward is not CausalLMHead.forward:
            return None
        if watched(self):
            return None
        outputs = self.base_model(**inputs, return_dict=True)
        return argmax(self.lm_head, outputs.last_hidden_state[:, -1])

    def make_output(
        self,
        outputs: Any,
        loss: torch.Tensor | None,
        logits: torch.Tensor | DeferredLogits,
        attention_mask: Any,
        **fields: Any,
    ) -> Any:
        """The model's output, from the backbone's `outputs`, the loss, the logits, and other fields of its class."""
        output_class = deferring(self.output_class) if isinstance(logits, DeferredLogits) else self.output_class
        more = {name: outputs[name] for name in _OF_BACKBONES if name in outputs} | fields
        return output_class(
            loss=loss,
            logits=logits,
            **cache_keyword(cache_of(outputs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **more,
        )

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> ModelOutput:
        """As the backbone's, and logits (B, T, vocabulary) of the positions `logits_to_keep` names.

        labels (B, T): the input tokens, -100 where ignored; shifted by one here. In training the loss of a large
        vocabulary is computed without the logits, which are computed if they are read.
        """
        of_backbone = {name: kwargs.pop(name) for name in self.backbone_arguments if name in kwargs}
        if self.backbone_keeps:
            of_backbone["logits_to_keep"] = logits_to_keep
        trains = labels is not None and self.training
        with tied_embedding.sharing(self.lm_head) if trains else nullcontext():
            outputs = self.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **cache_keyword(cache),
                inputs_embeds=inputs_embeds,
                return_dict=True,  # whatever the config says of the model
                use_cache=use_cache,
                **of_backbone,
                **kwargs,
            )
            kept = keep_logits(outputs.last_hidden_state, logits_to_keep)
            if labels is not None and isinstance(logits_to_keep, int) and not logits_to_keep:
                loss = self.fused_loss(kept, labels, **kwargs)
                if loss is not None:
                    deferred = DeferredLogits(lambda: self.finish_logits(linear(self.lm_head, kept)))
                    return self.make_output(outputs, loss, deferred, attention_mask)
        logits = self.finish_logits(linear(self.lm_head, kept))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return self.make_output(outputs, loss, logits, attention_mask)


class SoftcappedCausalLMHead(CausalLMHead):
    """`CausalLMHead` whose logits are bounded, cap * tanh(logits / cap), by `config.final_logit_softcapping`."""

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap = text_config_of(self.config).final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0, text_config_of(self.config).final_logit_softcapping


class SequenceClassificationHead(_Base):
    """Logits of the last token of each row that is not padding, on either side."""

    backbone_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self.score = nn.Linear(width_of(config), labels_of(config), bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """input_ids (B, T) -> logits (B, num_labels). labels: class indices (B,), or floats (B, num_labels) or (B,)."""
        outputs = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            return_dict=True,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        rows = torch.arange(logits.shape[0], device=logits.device)
        pooled_logits = logits[rows, self._last_token(input_ids, logits.shape[0], logits.device)]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled_logits,
            **cache_keyword(cache_of(outputs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _last_token(self, input_ids: torch.Tensor | None, batch: int, device: torch.device) -> torch.Tensor | int:
        padding = text_config_of(self.config).pad_token_id
        if padding is None and batch > 1:
            raise ValueError("Cannot handle batch sizes > 1 if no padding token is defined: set config.pad_token_id.")
        if padding is None or input_ids is None:
            if padding is not None:
                logger.warning("%s cannot find padding in inputs_embeds: it takes the last token", type(self).__name__)
            return -1
        positions = torch.arange(input_ids.shape[-1], device=device, dtype=torch.int32)
        return (positions * (input_ids != padding).to(device, torch.int32)).argmax(-1)


class TokenClassificationHead(_Base):
    """Logits of every token."""

    backbone_class: ClassVar[type[nn.Module]]
    classifier_name: ClassVar[str] = "score"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        chosen = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in chosen if rate is not None), 0.1))
        setattr(self, self.classifier_name, nn.Linear(width_of(config), labels_of(config)))
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """input_ids (B, T) -> logits (B, T, num_labels). labels (B, T), -100 where ignored."""
        outputs = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            return_dict=True,
            use_cache=use_cache,
            **kwargs,
        )
        logits = getattr(self, self.classifier_name)(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class QuestionAnsweringHead(_Base):
    """Logits of where the answer starts and ends."""

    backbone_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(width_of(config), 2)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """input_ids (B, T) -> start_logits and end_logits (B, T). start_positions and end_positions (B,)."""
        outputs = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
