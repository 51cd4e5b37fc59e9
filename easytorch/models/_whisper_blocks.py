"""Whisper's encoder of mel spectrograms, with fixed sinusoidal positions, and its decoder, with learned ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, EncoderDecoderCache, WhisperConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import check_one_input, without_adapter
from easytorch.layers.config_checks import padding_of
from easytorch.layers.encoder import CrossAttention, SelfAttention
from easytorch.layers.norm import LayerNorm
from easytorch.layers.seq2seq import decoder_masks, new_cache
from easytorch.layers.seq2seq_layers import (
    DecoderCrossAttention,
    DecoderLayer,
    DecoderSelfAttention,
    EncoderLayer,
    EncoderSelfAttention,
    dropped,
)
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeModel


class WhisperEncoderSelfAttention(EncoderSelfAttention):
    key_bias = False


class WhisperDecoderSelfAttention(DecoderSelfAttention):
    key_bias = False


class WhisperCrossAttention(DecoderCrossAttention):
    key_bias = False

    def query_key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One row of the decoder hears several recordings, one after another, as transformers'."""
        query, key, value = super().query_key_value(hidden_states, encoder_hidden_states, cache)
        rows = len(query)
        if len(key) != rows:
            key, value = (
                one.transpose(1, 2).reshape(rows, -1, one.shape[1], self.head_dim).transpose(1, 2)
                for one in (key, value)
            )
        return query, key, value


class WhisperEncoderLayer(EncoderLayer):
    pre_norm = True
    attention_class = WhisperEncoderSelfAttention


class WhisperDecoderLayer(DecoderLayer):
    pre_norm = True
    self_class, cross_class = WhisperDecoderSelfAttention, WhisperCrossAttention


class WhisperPreTrainedModel(NativeModel):
    config: WhisperConfig
    config_class = WhisperConfig
    base_model_prefix = "model"
    main_input_name = "input_features"
    input_modalities: Any = ("audio", "text")
    least_counts: ClassVar = {
        "encoder_layers": 0,
        "decoder_layers": 0,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 1,
        "decoder_ffn_dim": 1,
        "num_mel_bins": 1,
        "max_source_positions": 1,
        "max_target_positions": 1,
    }
    head_weights: ClassVar[tuple[str, ...]] = (r"^(proj_out|projector|classifier|layer_weights)(\.|$)",)
    _no_split_modules = ["WhisperEncoderLayer", "WhisperDecoderLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, WhisperEncoder):
            init.copy_(module.embed_positions.weight, sinusoids(*module.embed_positions.weight.shape))

    def _get_feat_extract_output_lengths(self, input_lengths: torch.Tensor) -> torch.Tensor:
        """Frames of the spectrogram -> frames of the encoder's output."""
        return (input_lengths - 1) // 2 + 1


class WhisperEncoder(WhisperPreTrainedModel):
    num_mel_bins, max_source_positions = given_by("config.num_mel_bins"), given_by("config.max_source_positions")
    padding_idx = given_by("config.pad_token_id")
    input_modalities: Any = ("audio",)
    _input_embed_layer = "conv1"
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": SelfAttention}  # noqa: RUF012

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        width = config.d_model
        self.dropout, self.layerdrop = config.dropout, config.encoder_layerdrop
        self.embed_scale = math.sqrt(width) if config.scale_embedding else 1.0  # not used, in transformers neither
        if width % 2 or width < 4:
            raise ValueError(
                f"whisper: config.d_model={width} must be even and at least 4: positions are "
                f"sines in one half and cosines in the other"
            )
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.embed_positions.requires_grad_(False)
        self.layers = nn.ModuleList(WhisperEncoderLayer(config, index) for index in range(config.encoder_layers))
        self.layer_norm = LayerNorm(width)
        self.gradient_checkpointing = False
        self.post_init()

    def _freeze_parameters(self) -> None:
        self.requires_grad_(False)
        self._requires_grad = False

    def frames(self) -> int:
        """The length in frames of the spectrograms that the encoder takes."""
        strides = (without_adapter(conv).stride[0] for conv in (self.conv1, self.conv2))
        return self.config.max_source_positions * math.prod(strides)

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, input_features: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> BaseModelOutput:
        """input_features (B, mels, frames) -> last_hidden_state (B, frames / 2, D).

        attention_mask is ignored, as in transformers: Whisper attends to padding, which is silence.
        """
        channels, frames = without_adapter(self.conv1).in_channels, self.frames()
        if input_features.dim() != 3 or input_features.shape[1] != channels:
            raise ValueError(
                f"input_features {tuple(input_features.shape)} must be (batch, {channels}, {frames}): the config has "
                f"num_mel_bins={channels}"
            )
        if input_features.shape[-1] != frames:
            raise ValueError(
                f"Whisper expects the mel input features to be of length {frames}, but found "
                f"{input_features.shape[-1]}. Make sure to pad the input mel features to {frames}."
            )
        embedded = F.gelu(self.conv1(input_features.to(self.conv1.weight.dtype)))
        embedded = F.gelu(self.conv2(embedded)).transpose(1, 2)
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        hidden_states = embedded + self.embed_positions(positions)
        hidden_states = F.dropout(hidden_states, self.dropout, self.training)
        for layer in self.layers:
            if not dropped(self.layerdrop, self.training):
                hidden_states = layer(hidden_states, None, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class WhisperDecoder(WhisperPreTrainedModel):
    max_target_positions = given_by("config.max_target_positions")
    max_source_positions = given_by("config.max_source_positions")
    padding_idx = given_by("config.pad_token_id")
    main_input_name = "input_ids"
    input_modalities: Any = ("text",)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DecoderLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
    }

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.dropout, self.layerdrop = config.dropout, config.decoder_layerdrop
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, padding_of(config))
        self.embed_positions = nn.Embedding(config.max_target_positions, config.d_model)
        self.layers = nn.ModuleList(WhisperDecoderLayer(config, index) for index in range(config.decoder_layers))
        self.layer_norm = LayerNorm(config.d_model)
        self.gradient_checkpointing = False
        self.post_init()

    def cache_for(self, cache: Cache | None, encoder_hidden_states: torch.Tensor | None) -> Cache:
        """`cache`, or a new one if it is None or an empty `DynamicCache`, which cannot hold the encoder's keys."""
        attends = encoder_hidden_states is not None
        unfit = attends and isinstance(cache, DynamicCache) and not isinstance(cache, EncoderDecoderCache)
        if cache is not None and not (unfit and cache.get_seq_length() == 0):
            return cache
        return new_cache(self.config, attends_to_encoder=attends or bool(self.config.is_encoder_decoder))

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D); encoder_hidden_states (B, S, D).

        attention_mask (B, past + T): 1 for tokens and 0 for padding. position_ids (B, T): by default
        they continue after the cache.
        """
        check_one_input(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache:
            cache = self.cache_for(cache, encoder_hidden_states)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + past
        hidden_states = inputs_embeds + self.embed_positions(position_ids)
        hidden_states = F.dropout(hidden_states, self.dropout, self.training)
        mask, _ = decoder_masks(self.config, inputs_embeds, attention_mask, None, None, cache)
        for layer in self.layers:
            if not dropped(self.layerdrop, self.training):
                hidden_states = layer(
                    hidden_states,
                    mask,
                    encoder_hidden_states,
                    None,
                    **cache_keyword(cache if use_cache else None),
                    **kwargs,
                )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states), **cache_keyword(cache)
        )
