"""Disentangled attention (DeBERTa, arXiv:2006.03654): scores of content with content, and of each with the distance.

Legend: B batch, T tokens, D hidden size, H heads, R rows of the embedding of distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from easytorch.layers.encoder import SelfAttention, check_heads
from easytorch.layers.linear import linear
from easytorch.layers.stock_names import given_by, same_as


def span_of(config: Any) -> tuple[int, int, int]:
    """(buckets, farthest, span): distances have rows 0 .. 2 * span - 1, row `span` is the distance 0.

    buckets: how many there are for both directions, 0 for a row each distance. `ValueError` where distances beyond the
    exact ones fall into no bucket.
    """
    buckets, farthest = getattr(config, "position_buckets", -1), getattr(config, "max_relative_positions", -1)
    if farthest < 1:
        farthest = config.max_position_embeddings
    if buckets < 1:
        return 0, farthest, farthest
    if buckets < 2 or farthest - 1 <= buckets // 2:
        raise ValueError(
            f"{config.model_type}: config.position_buckets={buckets} needs to be 2 or more, and the farthest distance "
            f"(config.max_relative_positions, {farthest} here) to exceed half of them by 2 or more"
        )
    return buckets, farthest, buckets


def log_bucket(distance: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """query - key -> -buckets .. buckets: itself up to half of the buckets, then by logarithm up to `farthest`."""
    half = buckets // 2
    steps = torch.where(distance.abs() < half, half - 1, distance.abs())
    # in float32, as the checkpoints were trained: where a logarithm is an integer the rounding decides
    widest = torch.log(torch.tensor((farthest - 1) / half))
    far = torch.ceil(torch.log(steps / half) / widest * (half - 1)) + half
    return torch.where(steps <= half, distance, (far * distance.sign()).long())


class DisentangledSelfAttention(SelfAttention):
    """Self attention whose scores see content and distance apart; `positions` is the embedding of distances (R, D).

    config.pos_att_type: "c2p" adds query with distance, "p2c" key with distance. share_att_key: distances go through
    the projections of query and key.
    """

    relative_attention = given_by("config.relative_attention")
    share_att_key = same_as("shared")
    max_relative_positions = same_as("farthest")
    pos_ebd_size = same_as("span")
    fused = ("query_proj", "key_proj", "value_proj")

    def __init__(self, config: Any, layer_idx: int, is_causal: bool = False) -> None:
        self.kinds = tuple(config.pos_att_type or ())
        super().__init__(config, layer_idx, is_causal)
        self.pos_att_type = list(self.kinds)
        self.scaling = (self.head_dim * (1 + ("c2p" in self.kinds) + ("p2c" in self.kinds))) ** -0.5

    @classmethod
    def width_of_heads(cls, config: Any) -> int:
        check_heads(config.hidden_size, config.num_attention_heads)
        width: int = config.hidden_size // config.num_attention_heads
        if (given := getattr(config, "attention_head_size", width)) != width:
            raise ValueError(
                f"{config.model_type}: config.attention_head_size={given} must be hidden_size / num_attention_heads, "
                f"{width} here: the output projection takes hidden_size features"
            )
        return width

    def make_projections(self, hidden_size: int) -> None:
        super().make_projections(hidden_size)
        config = self.config
        if not config.relative_attention:
            return
        self.buckets, self.farthest, self.span = span_of(config)
        self.position_buckets = getattr(config, "position_buckets", -1)
        self.shared = bool(getattr(config, "share_att_key", False))
        for kind, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
            if kind in self.kinds and not self.shared:
                setattr(self, name, nn.Linear(hidden_size, hidden_size))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """mask (B, 1, 1, T), True for tokens: padding gets the mean of all values, and its scores no gradient."""
        output, weights = super().attend(query, key, value, mask, **kwargs)
        if mask is None:
            return output, weights
        tokens = mask.transpose(2, 3)  # (B, 1, T, 1)
        if weights is not None:  # the output is theirs, so that their gradients can be asked for
            weights = torch.where(tokens, weights, 1.0 / query.shape[2])
            return (weights @ value).transpose(1, 2), weights
        return torch.where(tokens.transpose(1, 2), output, value.mean(2, keepdim=True).transpose(1, 2)), None

    def rows(self, length: int, device: torch.device) -> tuple[torch.Tensor, int, int]:
        """The row of each distance between `length` tokens (T, T), counted from the first that one has; first and end.

        Where distances share rows, and in a graph, which is for every length, these are all rows.
        """
        at = torch.arange(length, device=device)
        distances = at[:, None] - at
        if self.buckets:
            distances = log_bucket(distances, self.buckets, self.farthest)
        rows = (distances + self.span).clamp(0, 2 * self.span - 1)
        graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if graph or (self.buckets and self.buckets // 2 < length):
            return rows, 0, 2 * self.span
        first, end = max(self.span - length + 1, 0), min(self.span + length, 2 * self.span)
        return rows - first, first, end

    def position_bias(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor | None:
        """query, key (B, H, T, d), positions (R, D) -> (B, H, T, T), scaled as the scores are."""
        if positions is None or not {"c2p", "p2c"} & set(self.kinds):
            return None
        length = query.shape[2]
        rows, first, end = self.rows(length, query.device)
        embedded = F.dropout(positions[first:end], self.config.hidden_dropout_prob, self.training)
        bias: torch.Tensor | None = None
        for kind, states, own, shared in (
            ("c2p", query, "pos_key_proj", "key_proj"),
            ("p2c", key, "pos_query_proj", "query_proj"),
        ):
            if kind not in self.kinds:
                continue
            projection: Any = self._modules[shared if self.shared else own]
            distances = self.split(linear(projection, embedded)[None])[0] * self.scaling  # (H, R, d)
            scores = states @ distances.transpose(1, 2)  # (B, H, T, R)
            index = (rows if kind == "c2p" else rows.t()).expand(*scores.shape[:3], length)
            scores = scores.gather(3, index)
            scores = scores if kind == "c2p" else scores.transpose(2, 3)
            bias = scores if bias is None else bias + scores
        return bias


class ConvolutionBranch(nn.Module):
    """norm(x + act(dropout(conv(input)))), 0 where there is padding: what DeBERTa v2 adds after its first layer."""

    @property
    def conv_act(self) -> str:
        return str(getattr(self.config, "conv_act", "tanh"))

    def __init__(self, config: Any, activation: nn.Module) -> None:
        super().__init__()
        width, size = config.hidden_size, config.conv_kernel_size
        groups = getattr(config, "conv_groups", 1)
        self.conv = nn.Conv1d(width, width, size, padding=(size - 1) // 2, groups=groups)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = activation

    def forward(self, inputs: torch.Tensor, outputs: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """inputs and outputs of the layer (B, T, D), real (B, T), True for tokens -> (B, T, D)"""
        convolved = self.conv(inputs.transpose(1, 2)).transpose(1, 2)
        added = self.LayerNorm(outputs + self.activation(self.dropout(convolved)))
        return added if real is None else added * real[..., None]
