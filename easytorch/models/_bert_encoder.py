"""BERT (arXiv:1810.04805): an encoder of post-norm layers with learned positions, or a decoder if the config says so.

Class, parameter and argument names are transformers', so its checkpoints, Trainer, PEFT and pipelines work unchanged.
The heads and the weight rules are in bert.py. Legend: B batch, T tokens, D hidden size, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import BertConfig, Cache, DynamicCache, EncoderDecoderCache
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import check_one_input
from easytorch.layers.config_checks import padding_of
from easytorch.layers.encoder import CrossAttention, FirstTokenPooler, PostNormEncoder, PostNormLayer, SelfAttention
from easytorch.layers.encoder_heads import TiedWordHead
from easytorch.protocol.native import NativeModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind the backbone in the bases


class BertEmbeddings(nn.Module):
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        kind = getattr(config, "position_embedding_type", "absolute")  # of old checkpoints
        if kind != "absolute":
            raise ValueError(
                f"{config.model_type}: config.position_embedding_type={kind!r} is not carried, only 'absolute' is; "
                f"transformers 4 computed the others"
            )
        width = self.width(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=padding_of(config))
        self.add_positions(config, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # read by code that was written for transformers' class; here positions are counted from the cache's length
        positions = torch.arange(config.max_position_embeddings)[None]
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)

    @staticmethod
    def width(config: Any) -> int:
        return config.hidden_size

    def add_positions(self, config: Any, width: int) -> None:
        """The tables of positions and of token types, in the order of transformers: optimizer states follow it."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)

    def default_positions(
        self, input_ids: torch.Tensor | None, embeddings: torch.Tensor, past: int | torch.Tensor
    ) -> torch.Tensor:
        """position_ids (B or 1, T) where the caller gives none."""
        return (torch.arange(embeddings.shape[1], device=embeddings.device) + past)[None]

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
            position_ids = self.default_positions(input_ids, embeddings, past)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertLayer(PostNormLayer):
    pass


class BertPreTrainedModel(NativeModel):
    config: BertConfig
    config_class = BertConfig
    base_model_prefix = "bert"
    _can_record_outputs = {  # noqa: RUF012 - transformers' name and type
        "hidden_states": BertLayer,
        "attentions": SelfAttention,
        "cross_attentions": CrossAttention,
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
        if isinstance(module, TiedWordHead):
            init.zeros_(module.bias)


class BertBackbone(_Base):
    """Embeddings, layers and the pooler. Mixed in before the family's `PreTrainedModel`."""

    embeddings_class: ClassVar[type[BertEmbeddings]] = BertEmbeddings
    layer_class: ClassVar[type[PostNormLayer]] = BertLayer
    has_pooler: ClassVar[bool] = True
    output_class: ClassVar[type[Any]] = BaseModelOutputWithPoolingAndCrossAttentions

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.add_modules(config)
        self.pooler = FirstTokenPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def add_modules(self, config: Any) -> None:
        """Adds the modules before the pooler, in transformers' order, by which optimizer states are indexed."""
        self.embeddings = self.embeddings_class(config)
        self.encoder = PostNormEncoder(config, self.layer_class)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The first layer's hidden states from the embeddings (B, T, D); a hook for families that project them."""
        return embeddings

    @takes_cache
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
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and pooler_output (B, D).

        attention_mask: (B, T), 1 for tokens and 0 for padding, or (B, 1, T, S) of any pattern. A decoder takes the
        cache and, with `config.add_cross_attention`, encoder_hidden_states (B, S, D) and their mask (B, S).
        """
        check_one_input(input_ids, inputs_embeds)
        use_cache = bool(use_cache) and self.config.is_decoder
        if encoder_hidden_states is not None and self.config.is_decoder and not self.config.add_cross_attention:
            raise ValueError("encoder_hidden_states need cross-attention layers: set config.add_cross_attention=True")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            if encoder_hidden_states is not None or self.config.is_encoder_decoder:
                cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        past = cache.get_seq_length() if cache is not None else 0
        hidden_states = self.enter(self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids, past))
        if self.config.is_decoder:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                **cache_keyword(cache),
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
            **cache_keyword(cache),
            position_ids=position_ids,
            **kwargs,
        )
        pooled = {} if self.pooler is None else {"pooler_output": self.pooler(hidden_states)}
        return self.output_class(
            last_hidden_state=hidden_states, **cache_keyword(cache if use_cache else None), **pooled
        )


class BertModel(BertBackbone, BertPreTrainedModel):
    _no_split_modules = ["BertEmbeddings", "BertLayer"]  # noqa: RUF012
