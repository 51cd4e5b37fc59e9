"""The decoder that Llama and its descendants share: grouped rotary attention and a gated MLP, a norm before each.

A family names its parts in class attributes (`attention_class`, `mlp_class`, `norm_class`, `layer_class`,
`backbone_class`) and overrides a method where it differs; what differs then stands in its own file. Module, parameter
and argument names are transformers'. Legend: B batch, T tokens, D hidden size, H query heads, K key/value heads.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.attention import interface_of
from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.config import attn_implementation
from easytorch.layers.linear import linear
from easytorch.layers.masks import FULL, check_layer_types, masks_by_layer_type, window_of
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import RotaryEmbedding, apply_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind the backbone in the bases


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202: (..., D) -> (..., D)."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str | nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.down_proj, self.act_fn(linear(self.gate_proj, x)) * linear(self.up_proj, x))


class GroupedAttention(nn.Module):
    """Causal attention of H query heads over K key/value heads, with rotary positions (arXiv:2305.13245, 2104.09864).

    softcap: the bound of the scores, `softcap * tanh(scores / softcap)`. sliding_window: how many keys a query sees.
    """

    is_causal = True

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        *,
        layer_type: str = FULL,
        scaling: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = layer_type
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5 if scaling is None else scaling
        self.attention_dropout = config.attention_dropout
        self.sliding_window = window_of(config, layer_type)
        # only what the layer has: an attention function that a user registered need not know the others
        given = {"sliding_window": self.sliding_window, "softcap": softcap}
        self._features = {name: value for name, value in given.items() if value is not None}
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    def before_rotary(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query (B, T, H, head_dim) and key (B, T, K, head_dim) between their projection and their positions."""
        return query, key

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, D), position_embeddings cos and sin (B, T, R) -> (B, T, D) and weights or None.

        past_key_values: the keys and values of this layer are added to it, and all that it holds are attended to.
        """
        batch, length, _ = hidden_states.shape
        query = linear(self.q_proj, hidden_states).view(batch, length, -1, self.head_dim)
        key = linear(self.k_proj, hidden_states).view(batch, length, -1, self.head_dim)
        value = linear(self.v_proj, hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key = apply_rotary(*self.before_rotary(query, key), *position_embeddings)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = interface_of(attn_implementation(self.config))
        dropout = self.attention_dropout if self.training else 0.0
        features = self._features
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **features, **kwargs
        )
        return linear(self.o_proj, output.reshape(batch, length, -1)), weights


class DecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, D) -> (B, T, D)."""

    attention_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = self.mlp_class(config)
        self.input_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # by keyword, as transformers calls it: hooks and wrappers of the attention look for `hidden_states` there
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DecoderBackbone(_Base):
    """Embedding, layers and the last norm. Mixed in before the family's `PreTrainedModel`."""

    layer_class: ClassVar[type[nn.Module]]
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer_types = self.types_of_layers(config)
        check_layer_types(config, self.layer_types)
        self.embed_tokens = self.embedding(config)
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @staticmethod
    def types_of_layers(config: Any) -> list[str]:
        """One name of layers/masks.py for each layer: full attention, where a family does not say otherwise."""
        return [FULL] * config.num_hidden_layers

    @staticmethod
    def embedding(config: Any) -> nn.Embedding:
        """Token ids (B, T) -> (B, T, D)."""
        return nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and the cache when `use_cache`.

        attention_mask: (B, past + T), 1 for tokens and 0 for padding; (B, 1, T, S) of any pattern; or one for each type
        of layer, ready made. position_ids (B, T) that start again within a row mean packed sequences, which do not see
        each other.
        """
        check_one_input(input_ids, inputs_embeds)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        masks = masks_by_layer_type(
            self.config, self.layer_types, hidden_states, attention_mask, past_key_values, position_ids
        )
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past)[None]
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        # generate(assistant_early_exit=n) drafts with the first n layers by lowering the config's number for a while
        layers = itertools.islice(self.layers, self.config.num_hidden_layers)
        for layer, layer_type in zip(layers, self.layer_types, strict=False):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)
