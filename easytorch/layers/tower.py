"""The layers of vision and text towers: pre-norm attention and an MLP.

A family names its parts as its checkpoints do, in `add_modules` of its layer, and overrides the step where it differs.
Legend: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from easytorch.layers.attention import attend
from easytorch.layers.encoder import check_heads
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.linear import linear
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by, same_as


class TowerAttention(GroupedAttention):
    """Attention of each token to all of them, with as many key/value heads as query heads.

    order: of the projections, by which optimizer states are indexed. dropout_rate: the name of the config's
    rate of the weights.
    """

    embed_dim = given_by("config.hidden_size")
    dropout = same_as("attention_dropout")
    scale = same_as("scaling")
    is_causal = False
    output_name = "out_proj"
    order: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    dropout_rate: ClassVar[str] = "attention_dropout"

    def __init__(self, config: Any, layer_idx: int, *, bias: bool = True) -> None:
        super().__init__(config, layer_idx, bias=bias, out_bias=True)
        self.attention_dropout = getattr(config, self.dropout_rate)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        hidden, width = self.config.hidden_size, self.num_heads * self.head_dim
        for name in self.order:
            setattr(self, name, nn.Linear(hidden, width, bias=bias))
        setattr(self, self.output_name, nn.Linear(width, hidden, bias=out_bias))


class TowerMLP(PlainMLP):
    """fc2(act(fc1(x))): (B, T, D) -> (B, T, D)"""

    up_name, down_name, act_name = "fc1", "fc2", "activation_fn"

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        super().__init__(config.hidden_size, width, config.hidden_act, bias=True)


class TowerLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, D) -> (B, T, D).

    attention_name, mlp_name, norms: what the family calls its attention, its MLP and the norms before them.
    """

    attention_name: ClassVar[str] = "attention"
    mlp_name: ClassVar[str] = "mlp"
    norms: ClassVar[tuple[str, str]]
    mlp: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.add_modules(config, layer_idx)

    def add_modules(self, config: Any, layer_idx: int) -> None:
        """The submodules, in transformers' order, which optimizer states depend on."""
        raise NotImplementedError

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        """Hook between the attention's output and the residual sum."""
        return attended

    def after_mlp(self, output: torch.Tensor) -> torch.Tensor:
        """Hook between the MLP's output and the residual sum."""
        return output

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        norms, attention = [getattr(self, name) for name in self.norms], getattr(self, self.attention_name)
        attended, _ = attention(
            hidden_states=norms[0](hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + self.after_attention(attended)
        mlp = getattr(self, self.mlp_name)
        return hidden_states + self.after_mlp(mlp(norms[1](hidden_states)))


def through(
    layers: nn.ModuleList,
    hidden_states: torch.Tensor,
    attention_mask: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    states: list[torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Runs hidden_states (B, T, D) through `layers`; each layer's output is appended to `states`."""
    for layer in layers:
        hidden_states = layer(hidden_states, attention_mask, position_embeddings, **kwargs)
        if states is not None:
            states.append(hidden_states)
    return hidden_states


class TowerEncoder(nn.Module):
    """The layers as a module of their own. layers_name: what the family calls the list."""

    gradient_checkpointing = False
    layers_name: ClassVar[str] = "layers"

    def __init__(self, config: Any, layer_class: type[TowerLayer]) -> None:
        super().__init__()
        layers = nn.ModuleList(layer_class(config, index) for index in range(config.num_hidden_layers))
        setattr(self, self.layers_name, layers)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return through(getattr(self, self.layers_name), hidden_states, *args, **kwargs)


class LayerScale(nn.Module):
    """x * lambda1, by channel (arXiv:2103.17239): (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(config.layerscale_value * torch.ones(config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.lambda1


class DropPath(nn.Module):
    """Stochastic depth (arXiv:1603.09382) in training: some rows of x are 0, the others scaled up; the same shape."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.rate or not self.training:
            return hidden_states
        shape = (hidden_states.shape[0],) + (1,) * (hidden_states.dim() - 1)
        kept = torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device).add_(1 - self.rate).floor_()
        return hidden_states.div(1 - self.rate) * kept

    def extra_repr(self) -> str:
        return f"p={self.rate}"


class ScaledTowerLayer(TowerLayer):
    """DINO's: a norm before each part, and a learned scale and random depth after it."""

    norms = ("norm1", "norm2")
    attention_class: ClassVar[type[TowerAttention]]

    def new_mlp(self, config: Any) -> nn.Module:
        """The feed-forward network of a layer."""
        raise NotImplementedError

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.norm1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = self.attention_class(config, layer_idx)
        self.layer_scale1 = LayerScale(config)
        self.drop_path = DropPath(config.drop_path_rate)
        self.norm2 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = self.new_mlp(config)
        self.layer_scale2 = LayerScale(config)

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        return self.drop_path(self.layer_scale1(attended))

    def after_mlp(self, output: torch.Tensor) -> torch.Tensor:
        return self.drop_path(self.layer_scale2(output))


class PooledAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of one query to all tokens, by our attention; its `out_proj` may have an adapter."""

    is_causal = False

    def __init__(self, hidden_size: int, heads: int) -> None:
        check_heads(hidden_size, heads)
        super().__init__(hidden_size, heads, batch_first=True)

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """query (B, 1, D), states (B, T, D), mask (B, 1, 1, T), True attends -> (B, 1, D)."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        query, key, value = (
            nn.functional.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, states, states), weights, biases, strict=True)
        )
        attended, _ = attend(self, query, key, value, mask, output_attentions=False)
        return linear(self.out_proj, attended.flatten(2))
