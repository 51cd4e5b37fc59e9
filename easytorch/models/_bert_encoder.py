"""BERT (arXiv:1810.04805): an encoder of post-norm layers with learned positions, or a decoder if the config says so.

Class, parameter and argument names are transformers', so its checkpoints, Trainer, PEFT and pipelines work unchanged.
The heads and the weight rules are in bert.py. Legend: B batch, T tokens, D hidden size, H heads.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, Cache, DynamicCache, EncoderDecoderCache
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.attention import interface_of
from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.config import attn_implementation
from easytorch.layers.linear import linear
from easytorch.protocol.native import NativeModel


class BertEmbeddings(nn.Module):
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # read by code that was written for transformers' class; here positions are counted from the cache's length
        positions = torch.arange(config.max_position_embeddings)[None]
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past: int | torch.Tensor,
    ) -> torch.Tensor:
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = (torch.arange(embeddings.shape[1], device=embeddings.device) + past)[None]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertMultiHead(nn.Module):
    """Attention of the hidden states to the keys and values a subclass finds."""

    def __init__(self, config: BertConfig, layer_idx: int, is_causal: bool = False) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"The hidden size ({config.hidden_size}) is not a multiple of the number of attention heads "
                f"({config.num_attention_heads})"
            )
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def heads(self, projection: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden size) -> (B, H, T, head_dim)"""
        return linear(projection, states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self.heads(self.query, hidden_states)
        key, value = self.key_value(hidden_states, encoder_hidden_states, past_key_values)
        attend = interface_of(attn_implementation(self.config))
        dropout = self.dropout.p if self.training else 0.0
        scaling = self.head_dim**-0.5
        output, weights = attend(self, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        return output.flatten(2), weights


class BertSelfAttention(BertMultiHead):
    def key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.heads(self.key, hidden_states), self.heads(self.value, hidden_states)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx)


class BertCrossAttention(BertMultiHead):
    """Keys and values come from the encoder, once: later tokens read them from the cache."""

    def key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cache is not None and cache.is_updated.get(self.layer_idx):
            stored = cache.cross_attention_cache.layers[self.layer_idx]
            return stored.keys, stored.values
        key, value = self.heads(self.key, encoder_hidden_states), self.heads(self.value, encoder_hidden_states)
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value


class BertAddNorm(nn.Module):
    """Project, drop, add the residual, normalize: the end of both halves of a layer."""

    def __init__(self, config: BertConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(linear(self.dense, hidden_states)) + residual)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig, layer_idx: int, *, is_causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.self = (BertCrossAttention if cross else BertSelfAttention)(config, layer_idx, is_causal)
        self.output = BertAddNorm(config, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.self(hidden_states, attention_mask=attention_mask, **kwargs)
        return self.output(attended, hidden_states), weights


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(linear(self.dense, hidden_states))


class BertLayer(GradientCheckpointingLayer):
    def __init__(self, config: BertConfig, layer_idx: int) -> None:
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.attention = BertAttention(config, layer_idx, is_causal=config.is_decoder)
        if config.add_cross_attention:
            if not config.is_decoder:
                raise ValueError("config.add_cross_attention=True needs config.is_decoder=True")
            self.crossattention = BertAttention(config, layer_idx, cross=True)
        self.intermediate = BertIntermediate(config)
        self.output = BertAddNorm(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states, _ = self.attention(hidden_states, attention_mask, **kwargs)
        if encoder_hidden_states is not None and hasattr(self, "crossattention"):
            hidden_states, _ = self.crossattention(
                hidden_states, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states, **kwargs
            )
        return apply_chunking_to_forward(self.feed_forward_chunk, self.chunk_size_feed_forward, 1, hidden_states)

    def feed_forward_chunk(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.intermediate(hidden_states), hidden_states)


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, index) for index in range(config.num_hidden_layers))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        **kwargs,
    ) -> torch.Tensor:
        for layer in self.layer:
            # what carries gradients stands by position: reentrant checkpointing sees no keyword arguments
            hidden_states = layer(hidden_states, attention_mask, encoder_hidden_states, **kwargs)
        return hidden_states


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(linear(self.dense, hidden_states[:, 0]))


class BertPreTrainedModel(NativeModel):
    config: BertConfig
    config_class = BertConfig
    base_model_prefix = "bert"
    _can_record_outputs = {  # noqa: RUF012 - transformers' name and type
        "hidden_states": BertLayer,
        "attentions": BertSelfAttention,
        "cross_attentions": BertCrossAttention,
    }
    # buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.(position_ids|token_type_ids)$"]  # noqa: RUF012
    optional_weights = (r"(^|\.)pooler\.",)
    head_weights = (r"^(cls|classifier|qa_outputs)\.",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BertEmbeddings):  # loading starts on meta, where buffers have no values
            init.copy_(module.position_ids, torch.arange(module.position_ids.shape[-1])[None])
            init.zeros_(module.token_type_ids)


class BertModel(BertPreTrainedModel):
    _no_split_modules = ["BertEmbeddings", "BertLayer"]  # noqa: RUF012

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), pooler_output (B, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding, or (B, 1, T, S) of any pattern. A decoder takes the
        cache and, with `config.add_cross_attention`, encoder_hidden_states (B, S, D) and their mask (B, S).
        """
        check_one_input(input_ids, inputs_embeds)
        use_cache = bool(use_cache) and self.config.is_decoder
        if encoder_hidden_states is not None and self.config.is_decoder and not self.config.add_cross_attention:
            raise ValueError("encoder_hidden_states need cross-attention layers: set config.add_cross_attention=True")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
            if encoder_hidden_states is not None or self.config.is_encoder_decoder:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        hidden_states = self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids, past)
        if self.config.is_decoder:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
            )
        else:
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        if encoder_attention_mask is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        hidden_states = self.encoder(
            hidden_states,
            mask,
            encoder_hidden_states if self.config.is_decoder else None,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            pooler_output=self.pooler(hidden_states) if self.pooler is not None else None,
            past_key_values=past_key_values if use_cache else None,
        )
