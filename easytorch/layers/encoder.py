"""The layers of encoders: bidirectional attention and a feed-forward network, with a norm after each part.

A family names its parts in class attributes, as its checkpoints do, and overrides the step where it differs. What
BERT's decoders add (causal and cross attention, a cache) is here too. Legend: B batch, T tokens, D hidden size,
H heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import apply_chunking_to_forward

from easytorch.cache_names import takes_cache
from easytorch.layers.attention import interface_of
from easytorch.layers.basics import activation
from easytorch.layers.config import attn_implementation
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.linear import linear, watched
from easytorch.layers.stock_names import given_by, product_of, same_as


def check_heads(hidden_size: int, heads: int, entries: str = "hidden_size or num_attention_heads") -> None:
    """`ValueError` where the heads do not share the hidden size evenly. entries: their names in the config."""
    if hidden_size % heads:
        raise ValueError(
            f"The hidden size ({hidden_size}) is not a multiple of the number of attention heads ({heads}): change "
            f"config.{entries}"
        )


class MultiHeadAttention(FusedProjections):
    """Attention of the hidden states to the keys and values a subclass finds.

    fused: the names of query, key and value. heads_name, dropout_rate: the config's names of the number of heads and
    of the rate of the weights. dropout_module: whether `dropout` is a module, as BERT's, or the rate.
    """

    fused = ("query", "key", "value")
    heads_name: ClassVar[str] = "num_attention_heads"
    dropout_rate: ClassVar[str] = "attention_probs_dropout_prob"
    dropout_module: ClassVar[bool] = True
    attention_head_size = same_as("head_dim")
    all_head_size = product_of("num_attention_heads", "head_dim")
    is_decoder = given_by("config.is_decoder")

    def __init__(self, config: Any, layer_idx: int, is_causal: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.num_attention_heads: int = getattr(config, self.heads_name)
        self.head_dim = self.width_of_heads(config)
        self.scaling = self.head_dim**-0.5
        self.make_projections(config.hidden_size)
        rate = getattr(config, self.dropout_rate)
        self.dropout: nn.Dropout | float = nn.Dropout(rate) if self.dropout_module else rate

    @classmethod
    def width_of_heads(cls, config: Any) -> int:
        """The width of a head. `ValueError` where the config's heads do not share the hidden size evenly."""
        heads = getattr(config, cls.heads_name)
        check_heads(config.hidden_size, heads, f"hidden_size or {cls.heads_name}")
        width: int = config.hidden_size // heads
        return width

    def make_projections(self, hidden_size: int) -> None:
        """The modules under the names and in the order of transformers: optimizer states follow it."""
        for name in self.fused:
            setattr(self, name, nn.Linear(hidden_size, hidden_size))

    def split(self, projected: torch.Tensor) -> torch.Tensor:
        """(B, T, H * head_dim) -> (B, H, T, head_dim)"""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def query_key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query (B, H, T, head_dim), key and value (B, H, S, head_dim)."""
        raise NotImplementedError

    def position_bias(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A bias added to the scores, broadcastable to (B, H, T, S); positions: what the layer was given of them."""
        return positions

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D); the identity where the projection is a separate module."""
        return attended

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Cache | None = None,
        positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """-> (B, T, D), and the weights (B, H, T, S) or None."""
        query, key, value = self.query_key_value(hidden_states, encoder_hidden_states, cache)
        if positions is not None:
            kwargs["position_bias"] = self.position_bias(query, key, positions)
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return self.project_output(output.flatten(2)), weights

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """-> (B, T, H, head_dim), and the weights (B, H, T, S) or None."""
        attend = interface_of(attn_implementation(self.config))
        rate = self.dropout.p if isinstance(self.dropout, nn.Dropout) else self.dropout
        dropout = rate if self.training else 0.0
        return attend(self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs)


class SelfAttention(MultiHeadAttention):
    """Keys and values come from the hidden states, and from the cache where there is one."""

    def __init__(self, config: Any, layer_idx: int, is_causal: bool = False) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.lay_projections()

    def query_key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = map(self.split, self.projections(hidden_states))
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        return (query, key, value) if cache is None else (query, *cache.update(key, value, self.layer_idx))


class CrossAttention(MultiHeadAttention):
    """Keys and values come from the encoder, once: later tokens read them from the cache."""

    def query_key_value(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers: list[Any] = [self._modules[name] for name in self.fused]
        query = self.split(linear(layers[0], hidden_states))
        if not isinstance(cache, EncoderDecoderCache):
            cache = None  # it cannot hold the encoder's keys and values
        if cache is not None and cache.is_updated.get(self.layer_idx):
            stored: Any = cache.cross_attention_cache.layers[self.layer_idx]
            return query, stored.keys, stored.values
        assert encoder_hidden_states is not None, "cross-attention needs encoder_hidden_states"
        key, value = (self.split(linear(layer, encoder_hidden_states)) for layer in layers[1:])
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return query, key, value


class AddNorm(nn.Module):
    """Project, drop, add the residual, normalize: the end of both halves of a layer."""

    def __init__(self, config: Any, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        projected, dropout = linear(self.dense, hidden_states), self.dropout
        if type(dropout) is not nn.Dropout or dropout.training or watched(dropout):
            projected = dropout(projected)  # else it is the identity, at nine calls of Python
        return self.LayerNorm(projected + residual)


class EncoderAttention(nn.Module):
    """Attention and what ends its half of the layer: (B, T, D) -> (B, T, D), and the weights or None."""

    self_class: ClassVar[type[MultiHeadAttention]] = SelfAttention
    cross_class: ClassVar[type[MultiHeadAttention]] = CrossAttention

    def __init__(self, config: Any, layer_idx: int, *, is_causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.is_cross_attention = cross
        self.self = (self.cross_class if cross else self.self_class)(config, layer_idx, is_causal)
        self.output = AddNorm(config, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, weights = self.self(hidden_states, attention_mask=attention_mask, **kwargs)
        return self.output(attended, hidden_states), weights


class Intermediate(nn.Module):
    """act(dense(x)): (..., D) -> (..., intermediate size)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(linear(self.dense, hidden_states))


class PostNormLayer(GradientCheckpointingLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)), as BERT's (arXiv:1810.04805): (B, T, D) -> (B, T, D)."""

    attention_class: ClassVar[type[nn.Module]] = EncoderAttention
    seq_len_dim = 1  # of `apply_chunking_to_forward`

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.is_decoder = is_decoder = getattr(config, "is_decoder", False)
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.attention = self.attention_class(config, layer_idx, is_causal=is_decoder)
        self.add_cross_attention = getattr(config, "add_cross_attention", False)
        if self.add_cross_attention:
            if not is_decoder:
                raise ValueError("config.add_cross_attention=True needs config.is_decoder=True")
            self.crossattention = self.attention_class(config, layer_idx, cross=True)
        self.intermediate = Intermediate(config)
        self.output = AddNorm(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        hidden_states, _ = self.attention(hidden_states, attention_mask, positions=positions, **kwargs)
        if encoder_hidden_states is not None and hasattr(self, "crossattention"):
            hidden_states, _ = self.crossattention(
                hidden_states, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states, **kwargs
            )
        if not self.chunk_size_feed_forward:  # `apply_chunking_to_forward` looks at signatures each time
            return self.feed_forward_chunk(hidden_states)
        return apply_chunking_to_forward(
            self.feed_forward_chunk, self.chunk_size_feed_forward, self.seq_len_dim, hidden_states
        )

    def feed_forward_chunk(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.intermediate(hidden_states), hidden_states)


class PostNormEncoder(nn.Module):
    """The layers one after another."""

    gradient_checkpointing = False

    def __init__(
        self, config: Any, layer_class: type[PostNormLayer], first_class: type[PostNormLayer] | None = None
    ) -> None:
        """first_class: of the first layer, where it is another one."""
        super().__init__()
        kinds = [first_class or layer_class, *[layer_class] * config.num_hidden_layers][: config.num_hidden_layers]
        self.layer = nn.ModuleList(kind(config, index) for index, kind in enumerate(kinds))

    @property
    def n_layers(self) -> int:
        return len(self.layer)

    def positions(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The relative positions that every layer's attention gets, for `position_bias`."""
        return None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        positions = self.positions(hidden_states)
        for layer in self.layer:
            # what carries gradients stands by position: reentrant checkpointing sees no keyword arguments
            hidden_states = layer(hidden_states, attention_mask, encoder_hidden_states, positions, **kwargs)
        return hidden_states


class FirstTokenPooler(nn.Module):
    """tanh(dense(x of the first token)): (B, T, D) -> (B, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.activation(linear(self.dense, hidden_states[:, 0]))
        return pooled
