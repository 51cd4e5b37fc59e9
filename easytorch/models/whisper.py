"""Whisper (arXiv:2212.04356): an encoder of mel spectrograms after two convolutions, and a decoder of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, GenerationMixin, WhisperConfig
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.modeling_whisper import _compute_mask_indices
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.linear import linear
from easytorch.layers.seq2seq import as_outputs, outputs_of_both, shift_right
from easytorch.layers.seq2seq_heads import Seq2SeqLMHead, decoder_output
from easytorch.models._whisper_blocks import WhisperDecoder, WhisperEncoder, WhisperPreTrainedModel


class WhisperModel(WhisperPreTrainedModel):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embed_tokens = value

    def freeze_encoder(self) -> None:
        self.encoder._freeze_parameters()

    def masked_features(self, features: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """SpecAugment (arXiv:1904.08779), in training and if configured: spans of frames and of mels become 0."""
        config, (batch, mels, frames) = self.config, features.shape
        if not (config.apply_spec_augment and self.training):
            return features
        for kind, shape, mask in (("time", (batch, frames), attention_mask), ("feature", (batch, mels), None)):
            rate = getattr(config, f"mask_{kind}_prob")
            if rate > 0:
                length, least = (getattr(config, f"mask_{kind}_{name}") for name in ("length", "min_masks"))
                drawn = torch.from_numpy(_compute_mask_indices(shape, rate, length, mask, least)).to(features.device)
                features = features.masked_fill(drawn.unsqueeze(1 if kind == "time" else 2), 0.0)
        return features

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """input_features (B, mels, frames), decoder_input_ids (B, T) -> last_hidden_state (B, T, D).

        encoder_outputs: of an earlier call; the encoder is then not run. attention_mask (B, frames) is used only by
        SpecAugment.
        """
        if encoder_outputs is None:
            if input_features is None:
                raise ValueError("You have to specify input_features or encoder_outputs")
            encoder_outputs = self.encoder(
                self.masked_features(input_features, attention_mask), return_dict=True, **kwargs
            )
        encoder_outputs = as_outputs(encoder_outputs)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            **cache_keyword(cache),
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return outputs_of_both(encoder_outputs, outputs)


class WhisperForConditionalGeneration(Seq2SeqLMHead, WhisperPreTrainedModel, WhisperGenerationMixin):
    _tied_weights_keys = {"proj_out.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.model = WhisperModel(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.max_target_positions = config.max_target_positions
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.proj_out

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.proj_out = new_embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def freeze_encoder(self) -> None:
        self.model.freeze_encoder()

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Positions start at the first token that is not padding, so that left-padded segments can be batched."""
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and "decoder_position_ids" not in kwargs:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
            kwargs["decoder_position_ids"] = positions[..., -input_ids.shape[1] :]
        prepare: Any = WhisperGenerationMixin.prepare_inputs_for_generation
        prepared: dict[str, Any] = prepare(self, input_ids, *args, **kwargs)
        return prepared

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """As `WhisperModel`, and logits (B, T, vocabulary).

        labels (B, T): the tokens of the text, -100 where ignored; without decoder inputs they are shifted right to be
        its input. In training the loss of a large vocabulary is computed without the logits.
        """
        if labels is not None:
            if labels.shape[1] > self.max_target_positions:
                raise ValueError(
                    f"Labels' sequence length {labels.shape[1]} cannot exceed the maximum allowed length of "
                    f"{self.max_target_positions} tokens."
                )
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.shifted(labels)
        outputs = self.model(
            input_features,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            **cache_keyword(cache),
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return self.language_output(outputs, labels)


class WhisperDecoderWrapper(WhisperPreTrainedModel):
    """The decoder as the attribute `decoder`, so that its weights have the names of `WhisperModel`."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        config.is_encoder_decoder = False
        self.decoder = WhisperDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embed_tokens = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.decoder(*args, **kwargs)


class WhisperForCausalLM(WhisperPreTrainedModel, GenerationMixin):
    """The decoder alone, as an assistant model for speculative decoding with the same encoder."""

    main_input_name = "input_ids"
    head_weights = (*WhisperPreTrainedModel.head_weights, r"^(model\.)?encoder\.")
    _tied_weights_keys = {"proj_out.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        config.is_encoder_decoder = False
        self.model = WhisperDecoderWrapper(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.proj_out

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.proj_out = new_embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.model.set_input_embeddings(value)

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """As `WhisperDecoder`; encoder_outputs: (B, S, D), or what an encoder returned.

        labels (B, T): the next token of each, -100 where ignored; they are not shifted.
        """
        if isinstance(encoder_outputs, BaseModelOutput | tuple | list):
            encoder_outputs = encoder_outputs[0]
        outputs = self.model.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_outputs,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return decoder_output(outputs, self.proj_out, outputs.last_hidden_state, labels)


class WhisperForAudioClassification(WhisperPreTrainedModel):
    """A classifier of recordings, on the mean of the encoder's output over time."""

    layer_weights: nn.Parameter
    head_weights = (*WhisperPreTrainedModel.head_weights, r"^(model\.)?decoder\.")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = WhisperEncoder(config)
        if config.use_weighted_layer_sum:
            states = config.encoder_layers + 1  # the outputs of the layers, and the input of the first
            self.layer_weights = nn.Parameter(torch.ones(states) / states)
        self.projector = nn.Linear(config.d_model, config.classifier_proj_size)
        self.classifier = nn.Linear(config.classifier_proj_size, config.num_labels)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, WhisperForAudioClassification) and self.config.use_weighted_layer_sum:
            init.constant_(module.layer_weights, 1.0 / len(module.layer_weights))

    def freeze_encoder(self) -> None:
        self.encoder._freeze_parameters()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_features: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """input_features (B, mels, frames) -> logits (B, labels). labels: class indices (B,)."""
        weighted = self.config.use_weighted_layer_sum
        if encoder_outputs is None:
            if weighted:
                kwargs["output_hidden_states"] = True
            encoder_outputs = self.encoder(input_features, return_dict=True, **kwargs)
        encoder_outputs = as_outputs(encoder_outputs)
        hidden_states = encoder_outputs.last_hidden_state
        if weighted:
            if encoder_outputs.hidden_states is None:
                raise ValueError(
                    "config.use_weighted_layer_sum=True needs the hidden states of all layers, which "
                    "encoder_outputs lacks: compute it with output_hidden_states=True"
                )
            weights = F.softmax(self.layer_weights, dim=-1).view(-1, 1, 1)
            hidden_states = (torch.stack(encoder_outputs.hidden_states, dim=1) * weights).sum(dim=1)
        logits = self.classifier(linear(self.projector, hidden_states).mean(dim=1))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits, labels.flatten().to(logits.device))
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=encoder_outputs.hidden_states,
            attentions=encoder_outputs.attentions,
        )
