"""DeepSeek's sparse attention: a small attention chooses which tokens the latent attention sees (DeepSeek V3.2).

Legend: B batch, T tokens, S tokens in the cache too, D hidden size, R of what rotates, J heads of the indexer, C width
of each, k tokens that are chosen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.masking_utils import create_causal_mask

from easytorch.cache_names import takes_cache
from easytorch.layers.latent_attention import LatentAttention
from easytorch.layers.linear import linear
from easytorch.layers.masks import types_of_config
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import rotary
from easytorch.layers.stock_names import given_by, same_as

INDEXED = "indexed_attention"
# always a tensor: the indexer must not choose what comes later
MASKS_OF_INDEXED = {INDEXED: functools.partial(create_causal_mask, allow_is_causal_skip=False)}


class SparseIndexer(nn.Module):
    """The k tokens whose scores are largest: sum over heads of weight * relu(query . key), in float32.

    Of tokens that score exactly alike those of `torch.topk` are taken, as by transformers and by DeepSeek's own code,
    which define no order: which these are depends on the length of the row, so that a prompt in one call and one in
    parts may differ there. A score of 0, of a key that no head matches, is the usual tie, and rare with 64 heads.
    """

    n_heads = same_as("heads")
    qk_rope_head_dim = same_as("turning")
    hidden_size = given_by("config.hidden_size")
    q_lora_rank = given_by("config.q_lora_rank")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.softmax_scale = self.head_dim**-0.5
        self.turning, self.index_topk = config.qk_rope_head_dim, config.index_topk
        if self.turning > self.head_dim:
            raise ValueError(
                f"{config.model_type}: config.qk_rope_head_dim={self.turning} is more than "
                f"config.index_head_dim={self.head_dim}, of which it is the part that rotates"
            )
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    @takes_cache
    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        latent_query: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        cache: Cache | None,
        layer_idx: int,
    ) -> torch.Tensor:
        """hidden_states (B, T, D), latent_query (B, T, q_lora_rank), cos and sin (B, T, R), attention_mask (B or 1, 1,
        T, S) -> indices (B, T, k). The keys are appended to the cache, and no gradient goes through the choice."""
        query = linear(self.wq_b, latent_query).unflatten(-1, (self.heads, self.head_dim))
        key = self.k_norm(linear(self.wk, hidden_states))[:, :, None]
        rest = self.head_dim - self.turning
        (query, *query_rest), (key, *key_rest) = (one.split([self.turning, rest], dim=-1) for one in (query, key))
        query, key = rotary(query, key, *position_embeddings)
        query, key = torch.cat([query, *query_rest], dim=-1), torch.cat([key, *key_rest], dim=-1).squeeze(2)
        if cache is not None:
            key = cache.update_indexer(key, layer_idx)
        scores = torch.matmul(query.float(), key.float().mT[:, None]) * self.softmax_scale
        weights = linear(self.weights_proj, hidden_states.to(self.weights_proj.weight.dtype)).float()
        scores = torch.matmul((weights * self.heads**-0.5)[:, :, None], scores.relu())[:, :, 0]
        mask = attention_mask[:, 0]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` to the tokens that its indexer chooses: a mask for many queries, and for one their latents."""

    types_of_layers = staticmethod(types_of_config)

    def make_projections(self, hidden: int, bias: bool) -> None:
        if self.q_lora_rank is None:
            raise ValueError(f"{self.config.model_type}: config.q_lora_rank must be a number, not None")
        super().make_projections(hidden, bias)
        self.indexer = SparseIndexer(self.config, self.layer_idx)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `LatentAttention`; for a step over pages (cache/ragged_step.py) sequence by sequence."""
        if not hasattr(cache, "map_latents"):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)

        def run(states: torch.Tensor, angles: Any, mask: torch.Tensor, pages: Any) -> torch.Tensor:
            attended: torch.Tensor = super(SparseLatentAttention, self).forward(states, angles, mask, pages, **kwargs)[
                0
            ]
            return attended

        return cache.map_latents(run, hidden_states, position_embeddings), None

    def narrow(
        self,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        attention_mask: torch.Tensor | None,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Cache | None,
        with_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if not isinstance(attention_mask, torch.Tensor):
            raise ValueError(
                f"{self.config.model_type}: the indexer needs a mask (B, 1, T, S), not "
                f"{type(attention_mask).__name__}: one that is made elsewhere must be a tensor"
            )
        chosen = self.indexer(hidden_states, query, position_embeddings, attention_mask, cache, self.layer_idx)
        batch, length, count = chosen.shape
        keys = latent.shape[2]
        exporting = torch.compiler.is_exporting()  # a program that should not depend on the lengths it was traced with
        if not exporting and count == keys:
            return latent, key_rope, attention_mask
        if not exporting and length == 1 and not with_weights:
            mask = attention_mask.expand(batch, -1, -1, -1).gather(3, chosen[:, None])
            rows = chosen[:, :, :, None]
            latent, key_rope = (one.gather(2, rows.expand(-1, -1, -1, one.shape[3])) for one in (latent, key_rope))
            return latent, key_rope, mask
        left_out = chosen.new_ones((batch, length, keys), dtype=torch.bool).scatter(-1, chosen, False)[:, None]
        if attention_mask.dtype == torch.bool:
            return latent, key_rope, attention_mask & ~left_out
        return latent, key_rope, attention_mask.masked_fill(left_out, torch.finfo(attention_mask.dtype).min)
