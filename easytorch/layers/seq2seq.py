"""Shared by encoder-decoder families: one embedding, an encoder and a decoder that run one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqModelOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from easytorch.cache_names import cache_keyword, cache_of, takes_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases


def shift_right(tokens: torch.Tensor, start: int | None, padding: int | None) -> torch.Tensor:
    """The decoder's input to predict `tokens` (B, T): `start`, then all but the last, -100 as padding."""
    if start is None:
        raise ValueError("config.decoder_start_token_id is None: set it to the token that a decoder begins with")
    if padding is None:
        raise ValueError("config.pad_token_id is None: set it to the token that stands for labels of -100")
    shifted = torch.cat([torch.full_like(tokens[..., :1], start), tokens[..., :-1]], dim=-1)
    return shifted.masked_fill(shifted == -100, padding)


def own_cache(cache: Cache | None) -> Cache | None:
    """The cache of a decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def new_cache(config: PreTrainedConfig, *, attends_to_encoder: bool) -> Cache:
    """An empty cache for a decoder's self-attention and cross-attention."""
    own = DynamicCache(config=config)
    return EncoderDecoderCache(own, DynamicCache(config=config)) if attends_to_encoder else own


def decoder_masks(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    encoder_hidden_states: torch.Tensor | None,
    encoder_attention_mask: torch.Tensor | None,
    cache: Cache | None,
) -> tuple[Any, Any]:
    """The masks of a decoder's attention to its own tokens, and to the encoder's; None where there is nothing to mask.

    inputs_embeds (B, T, D), attention_mask (B, past + T), encoder_hidden_states (B, S, D), encoder_attention_mask
    (B, S); masks of any pattern are (B, 1, T, ...).
    """
    own = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        **cache_keyword(own_cache(cache)),
    )
    if encoder_hidden_states is None:
        return own, None
    cross = create_bidirectional_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=encoder_attention_mask,
        encoder_hidden_states=encoder_hidden_states,
    )
    return own, cross


def as_outputs(encoder_outputs: Any) -> BaseModelOutput:
    """An encoder's outputs of an earlier call, which may be a tuple."""
    if isinstance(encoder_outputs, BaseModelOutput):
        return encoder_outputs
    if isinstance(encoder_outputs, ModelOutput):  # by name: what was not asked for has no place in it
        given = ("last_hidden_state", "hidden_states", "attentions")
        return BaseModelOutput(**{name: encoder_outputs.get(name) for name in given})
    return BaseModelOutput(*encoder_outputs[:3])


def outputs_of_both(encoder: BaseModelOutput, decoder: Any) -> Seq2SeqModelOutput:
    """The model's output, from its encoder's and its decoder's."""
    return Seq2SeqModelOutput(
        last_hidden_state=decoder.last_hidden_state,
        **cache_keyword(cache_of(decoder)),
        decoder_hidden_states=decoder.hidden_states,
        decoder_attentions=decoder.attentions,
        cross_attentions=decoder.cross_attentions,
        encoder_last_hidden_state=encoder.last_hidden_state,
        encoder_hidden_states=encoder.hidden_states,
        encoder_attentions=encoder.attentions,
    )


class EncoderDecoder(_Base):
    """`shared`, `encoder` and `decoder`, as attributes of the model itself, and the forward of both.

    shifts_inputs: whether a decoder that is given nothing reads the encoder's tokens, shifted by one.
    """

    shifts_inputs: ClassVar[bool] = False
    shared: nn.Embedding
    encoder: Any
    decoder: Any

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.shared = new_embeddings  # type: ignore[assignment]
        for part in ("encoder", "decoder"):
            if hasattr(self, part):
                getattr(self, part).embed_tokens = new_embeddings

    def shifted(self, tokens: torch.Tensor) -> torch.Tensor:
        """The decoder's input to predict `tokens` (B, T)."""
        return shift_right(tokens, self.config.decoder_start_token_id, self.config.pad_token_id)

    def encode_decode(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """input_ids (B, S), decoder_input_ids (B, T) -> last_hidden_state (B, T, D) and what each half returns.

        encoder_outputs: those of an earlier call, as `BaseModelOutput` or a tuple; the encoder is then not run.
        """
        if self.shifts_inputs and decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None:
                raise ValueError(
                    "If no `decoder_input_ids` or `decoder_inputs_embeds` are passed, `input_ids` cannot be `None`: "
                    "the decoder would read them"
                )
            decoder_input_ids = self.shifted(input_ids)
        kwargs["return_dict"] = True  # of both halves, whatever the config says of the model
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        encoder_outputs = as_outputs(encoder_outputs)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            **cache_keyword(cache),
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        return outputs_of_both(encoder_outputs, outputs)


class Seq2SeqModel(EncoderDecoder):
    """The model without a head."""

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
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """As `encode_decode`."""
        return self.encode_decode(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            **kwargs,
        )
