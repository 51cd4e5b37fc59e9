"""The layers of BART and those that descend from it: norms after each part, or before it (mBART, Whisper).

Module, parameter and argument names are transformers'. Legend: B batch, T tokens, S tokens of the encoder, D hidden
size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import activation
from easytorch.layers.encoder import CrossAttention, MultiHeadAttention, SelfAttention
from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by, same_as


class Projections(MultiHeadAttention):
    """Query, key, value and output projections. key_bias: whether the keys have a bias."""

    fused = ("q_proj", "k_proj", "v_proj")
    dropout_rate = "attention_dropout"
    dropout_module = False
    embed_dim = given_by("config.d_model")
    num_heads = same_as("num_attention_heads")
    key_bias: ClassVar[bool] = True
    out_proj: nn.Linear

    def make_projections(self, hidden_size: int) -> None:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(hidden_size, hidden_size, bias=self.key_bias or name != "k_proj"))

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        return linear(self.out_proj, attended)


class EncoderSelfAttention(Projections, SelfAttention):
    is_decoder = False
    heads_name = "encoder_attention_heads"


class DecoderSelfAttention(Projections, SelfAttention):
    is_decoder = True
    heads_name = "decoder_attention_heads"


class DecoderCrossAttention(Projections, CrossAttention):
    is_decoder = True
    heads_name = "decoder_attention_heads"


def within_half(hidden_states: torch.Tensor) -> torch.Tensor:
    """Clamp infinities of float16 to its largest values; the dtype of training does not overflow there."""
    if hidden_states.dtype is not torch.float16:
        return hidden_states
    largest = torch.finfo(torch.float16).max
    bound = torch.where(torch.isinf(hidden_states).any(), largest - 1000, largest)
    return torch.clamp(hidden_states, min=-bound, max=bound)


class Seq2SeqLayer(GradientCheckpointingLayer):
    """A residual layer: each sublayer has a norm.

    pre_norm: the norm is applied before the sublayer, else after the residual sum.
    """

    pre_norm: ClassVar[bool] = False
    embed_dim = given_by("config.d_model")

    def add_mlp(self, config: Any, inner: int) -> None:
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.activation_fn = activation(config.activation_function)
        self.fc1 = nn.Linear(config.d_model, inner)
        self.fc2 = nn.Linear(inner, config.d_model)
        self.final_layer_norm = LayerNorm(config.d_model)

    def before(self, norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sublayer's input: normalized if `pre_norm`."""
        return norm(hidden_states) if self.pre_norm else hidden_states

    def after(self, norm: nn.Module, added: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The residual sum, with dropout on `added`; normalized unless `pre_norm`."""
        hidden_states = hidden_states + F.dropout(added, self.dropout, self.training)
        return hidden_states if self.pre_norm else norm(hidden_states)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.activation_fn(linear(self.fc1, self.before(self.final_layer_norm, hidden_states)))
        added = linear(self.fc2, F.dropout(inner, self.activation_dropout, self.training))
        return self.after(self.final_layer_norm, added, hidden_states)


class EncoderLayer(Seq2SeqLayer):
    """Bidirectional attention and a feed-forward network: (B, S, D) -> (B, S, D)."""

    attention_class: ClassVar[type[EncoderSelfAttention]] = EncoderSelfAttention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.self_attn_layer_norm = LayerNorm(config.d_model)
        self.add_mlp(config, config.encoder_ffn_dim)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        added, _ = self.self_attn(
            self.before(self.self_attn_layer_norm, hidden_states), attention_mask=attention_mask, **kwargs
        )
        hidden_states = self.after(self.self_attn_layer_norm, added, hidden_states)
        return within_half(self.feed_forward(hidden_states))


class DecoderLayer(Seq2SeqLayer):
    """Attention to the past, to the encoder where its states are given, and a feed-forward network."""

    self_class: ClassVar[type[DecoderSelfAttention]] = DecoderSelfAttention
    cross_class: ClassVar[type[DecoderCrossAttention]] = DecoderCrossAttention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.self_class(config, layer_idx, is_causal=True)
        self.self_attn_layer_norm = LayerNorm(config.d_model)
        self.encoder_attn = self.cross_class(config, layer_idx)
        self.encoder_attn_layer_norm = LayerNorm(config.d_model)
        self.add_mlp(config, config.decoder_ffn_dim)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, D) -> (B, T, D). The encoder's states stand by position: reentrant checkpointing sees no others."""
        added, _ = self.self_attn(
            self.before(self.self_attn_layer_norm, hidden_states),
            attention_mask=attention_mask,
            **cache_keyword(cache),
            **kwargs,
        )
        hidden_states = self.after(self.self_attn_layer_norm, added, hidden_states)
        if encoder_hidden_states is not None:
            added, _ = self.encoder_attn(
                self.before(self.encoder_attn_layer_norm, hidden_states),
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                **cache_keyword(cache),
                **kwargs,
            )
            hidden_states = self.after(self.encoder_attn_layer_norm, added, hidden_states)
        return self.feed_forward(hidden_states)


def dropped(layerdrop: float, training: bool) -> bool:
    """Whether a layer is left out, as in LayerDrop (arXiv:1909.11556)."""
    return training and layerdrop > 0.0 and bool(torch.rand([]) < layerdrop)
