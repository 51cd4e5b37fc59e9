"""DeepSeek's attention, which caches one latent and one rotated key per token, shared by all heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from easytorch.cache_names import takes_cache
from easytorch.kernels.multi_latent.contract import LatentDims, absorbs
from easytorch.layers.attention import interface_of, observed
from easytorch.layers.config import attn_implementation, wants_attentions
from easytorch.layers.linear import linear, plain_weight
from easytorch.layers.masks import all_full
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import rotary
from easytorch.layers.stock_names import given_by
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.environment import forced_by_environment

multi_latent_attention = OperationRegistry.create("multi_latent_attention")

# Arguments of an attention function that only a call with the expanded keys of every head supports.
_OF_EXPANDED = ("cache", "cu_seq_lens_q")


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    Many queries attend to the keys and values of every head, which `kv_b_proj` makes of the latents; few queries over
    a long cache attend to the latents themselves (kernels/multi_latent/contract.py). A family overrides `rotate`, and
    `narrow` where few of the tokens are attended to.
    Legend: B batch, T tokens, S tokens in the cache too, D hidden size, H heads, L width of a latent, R of what
    rotates, Dn of the rest of a query or key, Dv of a value.
    """

    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    hidden_size = given_by("config.hidden_size")
    is_causal = True
    types_of_layers = staticmethod(all_full)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = 1  # read by registered attentions to repeat keys: each head has its own
        self.attention_dropout = config.attention_dropout
        self.q_lora_rank, self.kv_lora_rank = config.q_lora_rank, config.kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim, config.v_head_dim
        self.scaling = self.qk_head_dim**-0.5 * yarn_scale(getattr(config, "rope_parameters", {})) ** 2
        self.sizes = LatentDims(
            self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank, self.v_head_dim
        )
        self.make_projections(config.hidden_size, config.attention_bias)

    def make_projections(self, hidden: int, bias: bool) -> None:
        """The modules, under the names and in the order of transformers."""
        width = self.num_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, width, bias=False)
            self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        else:
            self.q_proj = None
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank)
        expanded = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=bias)

    def compress_query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> what queries are made of: (B, T, `q_lora_rank`), or the hidden states themselves."""
        if self.q_lora_rank is None:
            return hidden_states
        return self.q_a_layernorm(linear(self.q_a_proj, hidden_states))

    def queries(self, compressed: torch.Tensor) -> torch.Tensor:
        """The output of `compress_query` -> queries (B, T, H, Dn + R)."""
        query = linear(self.q_proj if self.q_lora_rank is None else self.q_b_proj, compressed)
        return query.view(*compressed.shape[:2], -1, self.qk_head_dim)

    def narrow(
        self,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        attention_mask: torch.Tensor | None,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        with_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """latent (B, 1, S, L), key_rope (B, 1, S, R) and the mask (B, 1, T, S): those of the tokens that are attended
        to. query: what `compress_query` gave. with_weights: the attention's weights, which have a column for every
        token, may be an output."""
        return latent, key_rope, attention_mask

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query (B, T, H, R) and key (B, T, 1, R) rotated by their positions."""
        return rotary(query, key, *position_embeddings)

    def expand(self, latent: torch.Tensor, key_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent (B, 1, S, L), key_rope (B, 1, S, R) -> key (B, H, S, Dn + R) and value (B, H, S, Dv)."""
        batch, _, keys, _ = latent.shape
        heads = linear(self.kv_b_proj, latent).view(batch, keys, -1, self.qk_nope_head_dim + self.v_head_dim)
        key, value = heads.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        # autocast casts the product, but not what it is concatenated with
        return torch.cat([key, key_rope.to(key.dtype).expand(-1, key.shape[1], -1, -1)], dim=-1), value

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, D), position_embeddings cos and sin (B, T, R) -> (B, T, D) and weights or None.

        cache: a `Cache`, or a step over pages; holds latents as the keys of one head and rotated keys as its
        values.
        """
        batch, length, _ = hidden_states.shape
        latent_query = self.compress_query(hidden_states)
        query, query_rope = self.queries(latent_query).split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        compressed = linear(self.kv_a_proj_with_mqa, hidden_states)
        latent, key_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        query_rope, key_rope = self.rotate(query_rope, key_rope[:, :, None], position_embeddings)
        latent, key_rope = self.kv_a_layernorm(latent)[:, None], key_rope.transpose(1, 2)
        if attention_mask is None and hasattr(cache, "attend_latents") and self.attends_to_pages(kwargs):
            observed(self)
            paged = cache.attend_latents(
                query, query_rope, latent, key_rope, *self._ups(), self.layer_idx, softmax_scale=self.scaling
            )
            return linear(self.o_proj, paged.reshape(batch, length, -1)), None
        if cache is not None:
            latent, key_rope = cache.update(latent, key_rope, self.layer_idx, kwargs=kwargs)
        with_weights = bool(kwargs.get("output_attentions")) or wants_attentions(self.config)
        with_weights = with_weights or attn_implementation(self.config) == "eager"
        latent, key_rope, attention_mask = self.narrow(
            latent, key_rope, attention_mask, hidden_states, latent_query, position_embeddings, cache, with_weights
        )
        if self._absorbs(query, latent, attention_mask, kwargs):
            observed(self)
            output, weights = self._absorbed(query, query_rope, latent[:, 0], key_rope[:, 0], attention_mask), None
        else:
            query = torch.cat([query, query_rope.to(query.dtype)], dim=-1).transpose(1, 2)
            attend = interface_of(attn_implementation(self.config))
            dropout = self.attention_dropout if self.training else 0.0
            output, weights = attend(
                self,
                query,
                *self.expand(latent, key_rope),
                attention_mask,
                scaling=self.scaling,
                dropout=dropout,
                **kwargs,
            )
        return linear(self.o_proj, output.reshape(batch, length, -1)), weights

    def _absorbs(self, query: torch.Tensor, latent: torch.Tensor, attention_mask: Any, kwargs: dict[str, Any]) -> bool:
        """True where attending to the latents is possible, gives the same result, and takes fewer multiplications.

        Not in an exported program, which should not depend on the lengths it was traced with.
        """
        weight = plain_weight(self.kv_b_proj)
        if weight is None or weight.dtype != query.dtype or latent.dtype != query.dtype:
            return False
        if attn_implementation(self.config) != "easytorch" or forced_by_environment("attention") is not None:
            return False
        if self.training and self.attention_dropout:
            return False
        wanted = kwargs.get("output_attentions")
        if wanted or (wanted is None and wants_attentions(self.config)):
            return False
        if torch.compiler.is_exporting() or any(kwargs.get(name) is not None for name in _OF_EXPANDED):
            return False
        if attention_mask is None:
            masked = query.shape[1] == 1  # one query attends to every key
        else:
            masked = isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
        return masked and absorbs(self.sizes, query.shape[1], latent.shape[2], True, True)

    def _absorbed(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """query (B, T, H, Dn), query_rope (B, T, H, R), latent (B, S, L), key_rope (B, S, R) -> (B, T, H, Dv)."""
        features: dict[str, Any] = {"softmax_scale": self.scaling}
        if mask is not None:
            features["mask"] = mask
        return multi_latent_attention(query, query_rope, latent, key_rope, *self._ups(), **features).attention_outputs

    def _ups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices that expand a latent into the key (H, Dn, L) and the value (H, Dv, L) of each head."""
        up = self.kv_b_proj.weight.view(-1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        up_key, up_value = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return up_key, up_value

    def attends_to_pages(self, asked: Mapping[str, Any]) -> bool:
        """Whether a call attends to the pages of latents themselves (`GroupedAttention.features_of_pages`)."""
        if type(self).narrow is not LatentAttention.narrow:  # pages know nothing of an indexer's choice
            return False
        if self.training or plain_weight(self.kv_b_proj) is None or asked.get("output_attentions"):
            return False
        return attn_implementation(self.config) in ("easytorch", "sdpa") and not wants_attentions(self.config)


def yarn_scale(rope: dict[str, Any]) -> float:
    """The scale of queries and keys in yarn, if `mscale_all_dim` is set (arXiv:2309.00071)."""
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not weight or rope["factor"] <= 1:
        return 1.0
    return 0.1 * weight * math.log(rope["factor"]) + 1.0
