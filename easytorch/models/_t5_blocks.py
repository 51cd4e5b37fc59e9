"""The layers of T5's encoder and decoder: norms before each part, and a bias of the scores by distance.

The first layer's attention makes the bias, which the others reuse. Legend: B batch, T tokens, S keys, D hidden size, H
heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from easytorch.cache_names import takes_cache
from easytorch.layers.basics import activation
from easytorch.layers.encoder import CrossAttention, MultiHeadAttention, SelfAttention
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.gate import gated
from easytorch.layers.linear import linear
from easytorch.layers.norm import RMSNorm, rms_norm
from easytorch.layers.relative_bias import merged, relative_bias
from easytorch.layers.seq2seq import own_cache
from easytorch.layers.seq2seq_layers import within_half
from easytorch.layers.stock_names import given_by, product_of, same_as

HALF = (torch.float16, torch.bfloat16)


class T5LayerNorm(RMSNorm):
    """RMSNorm whose result has the weight's dtype if that is half: `wo` may be float32 beside it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype is weight.dtype:
            return rms_norm(hidden_states, weight, self.variance_epsilon)
        normed = rms_norm(hidden_states.float(), weight.float(), self.variance_epsilon)
        return normed.to(weight.dtype) if weight.dtype in HALF else normed


def projected_by(layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """`layer`, which may be kept in float32 while the model is in half precision."""
    weight: Any = layer.weight
    if isinstance(weight, torch.Tensor) and weight.dtype in (*HALF, torch.float32, torch.float64):
        hidden_states = hidden_states.to(weight.dtype)
    return linear(layer, hidden_states)


class T5DenseActDense(nn.Module):
    """wo(act(wi(x))): (..., D) -> (..., D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = activation(config.dense_act_fn)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return projected_by(self.wo, self.dropout(self.act(linear(self.wi, hidden_states))))


class T5DenseGatedActDense(FusedProjections):
    """wo(act(wi_0(x)) * wi_1(x)), of T5 1.1 and mT5: (..., D) -> (..., D)."""

    fused = ("wi_0", "wi_1")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = activation(config.dense_act_fn)
        self.lay_projections()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.projections(hidden_states)
        return projected_by(self.wo, self.dropout(gated(self.act, gate, up)))


class T5LayerFF(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.DenseReluDense = (T5DenseGatedActDense if config.is_gated_act else T5DenseActDense)(config)
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.dropout(self.DenseReluDense(self.layer_norm(hidden_states)))


class T5Projections(MultiHeadAttention):
    """Projections without biases, of heads whose width is their own, and scores that are not scaled."""

    gradient_checkpointing = False
    fused = ("q", "k", "v")
    dropout_rate = "dropout_rate"
    dropout_module = False
    heads_name = "num_heads"
    has_relative_attention_bias = False
    relative_attention_num_buckets = given_by("config.relative_attention_num_buckets")
    relative_attention_max_distance = given_by("config.relative_attention_max_distance")
    d_model = given_by("config.d_model")
    n_heads, key_value_proj_dim = same_as("num_attention_heads"), same_as("head_dim")
    inner_dim = product_of("num_attention_heads", "head_dim")

    def __init__(self, config: Any, layer_idx: int, is_causal: bool = False) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.scaling = 1.0

    @classmethod
    def width_of_heads(cls, config: Any) -> int:
        width: int = config.d_kv
        return width

    def make_projections(self, hidden_size: int) -> None:
        inner = self.config.num_heads * self.head_dim
        for name in self.fused:
            setattr(self, name, nn.Linear(hidden_size, inner, bias=False))
        self.o = nn.Linear(inner, hidden_size, bias=False)

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        return linear(self.o, attended)


class T5SelfAttention(T5Projections, SelfAttention):
    """Attention with a bias by distance, which the first layer has the table of."""

    def __init__(self, config: Any, layer_idx: int, has_relative_attention_bias: bool) -> None:
        super().__init__(config, layer_idx, config.is_decoder)
        self.has_relative_attention_bias = has_relative_attention_bias
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)

    def compute_bias(
        self, hidden_states: torch.Tensor, attention_mask: Any, cache: Cache | None
    ) -> torch.Tensor | None:
        """The relative position bias (B or 1, H, T, S), the mask added where it is a tensor.

        A fully masked row then attends to every key equally, as in transformers.
        """
        if not self.has_relative_attention_bias:  # one layer alone, outside of its stack
            return None
        length, own, past = hidden_states.shape[1], own_cache(cache), 0
        keys = length
        if own is not None:
            past, (keys, _) = own.get_seq_length(self.layer_idx), own.get_mask_sizes(length, self.layer_idx)
        bias = relative_bias(
            self.relative_attention_bias,
            length,
            keys,
            past,
            farthest=self.config.relative_attention_max_distance,
            bidirectional=not self.is_causal,
            device=hidden_states.device,
        )
        return merged(attention_mask, bias) if isinstance(attention_mask, torch.Tensor) else bias

    @takes_cache
    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """-> (B, T, D), the bias of the scores for the next layers, and the weights (B, H, T, S) or None."""
        if position_bias is None:
            position_bias = self.compute_bias(hidden_states, attention_mask, cache)
        # a tensor that masks is in the bias already; what else an implementation takes as its mask stands beside it
        inside = position_bias is not None and isinstance(attention_mask, torch.Tensor)
        attended, weights = super().forward(
            hidden_states,
            position_bias if inside else attention_mask,
            cache=cache,
            positions=None if inside else position_bias,
            **kwargs,
        )
        return attended, position_bias, weights


class T5CrossAttention(T5Projections, CrossAttention):
    pass


class T5LayerSelfAttention(nn.Module):
    def __init__(self, config: Any, has_relative_attention_bias: bool = False, layer_idx: int = 0) -> None:
        super().__init__()
        self.SelfAttention = T5SelfAttention(config, layer_idx, has_relative_attention_bias)
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        attended, position_bias, weights = self.SelfAttention(
            self.layer_norm(hidden_states), attention_mask, position_bias, cache, **kwargs
        )
        return hidden_states + self.dropout(attended), position_bias, weights


class T5LayerCrossAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int = 0) -> None:
        super().__init__()
        self.EncDecAttention = T5CrossAttention(config, layer_idx)
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.EncDecAttention(
            self.layer_norm(hidden_states), attention_mask, encoder_hidden_states, cache, **kwargs
        )
        return hidden_states + self.dropout(attended), weights


class T5Block(GradientCheckpointingLayer):
    """Attention, in a decoder attention to the encoder too, and a feed-forward network."""

    def __init__(self, config: Any, has_relative_attention_bias: bool = False, layer_idx: int = 0) -> None:
        super().__init__()
        self.is_decoder = config.is_decoder
        self.layer = nn.ModuleList([T5LayerSelfAttention(config, has_relative_attention_bias, layer_idx)])
        if self.is_decoder:
            self.layer.append(T5LayerCrossAttention(config, layer_idx))
        self.layer.append(T5LayerFF(config))

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_bias: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, D) -> (B, T, D), and the bias of the scores for the next layers.

        What carries gradients stands by position: reentrant checkpointing sees no keyword arguments.
        """
        hidden_states, position_bias, _ = self.layer[0](hidden_states, attention_mask, position_bias, cache, **kwargs)
        hidden_states = within_half(hidden_states)
        if self.is_decoder and encoder_hidden_states is not None:
            hidden_states, _ = self.layer[1](
                hidden_states, encoder_hidden_states, encoder_attention_mask, cache, **kwargs
            )
            hidden_states = within_half(hidden_states)
        return within_half(self.layer[-1](hidden_states)), position_bias
