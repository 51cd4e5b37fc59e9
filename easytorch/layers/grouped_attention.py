"""The attention of decoders: H query heads over K key/value heads, causal, with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache

from easytorch.cache_names import takes_cache
from easytorch.layers.attention import interface_of, observed
from easytorch.layers.config import attn_implementation, config_of_layer, wants_attentions
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.linear import linear
from easytorch.layers.masks import CHUNKED, SLIDING, all_full, window_of
from easytorch.layers.rotary import rotary
from easytorch.layers.stock_names import given_by, same_as
from easytorch.operations.dispatch.environment import untouched


class GroupedAttention(FusedProjections):
    """Grouped-query attention with rotary positions (arXiv:2305.13245, 2104.09864).

    A family overrides the step where it differs: `make_projections` and `project` (projections that are stored as one),
    `rotate` (norms before or after the rotation, layers without it, scales by position), `features` (sinks),
    `project_output` (gates, dropout). `types_of_layers` gives each layer's type (layers/masks.py), to the layers and to
    the model. Legend: B batch, T tokens, D hidden size, H query heads, K key/value heads.
    """

    hidden_size = given_by("config.hidden_size")
    num_attention_heads = same_as("num_heads")
    fused: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    is_causal = True
    interleaved: ClassVar[bool] = False  # pairs that rotate together are adjacent, not half a head apart
    output_name: ClassVar[str] = "o_proj"
    types_of_layers = staticmethod(all_full)

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        bias: bool | None = None,
        out_bias: bool | None = None,
    ) -> None:
        """scaling: of the scores, head_dim**-0.5 unless given. softcap: their bound, softcap * tanh(scores / softcap).

        bias: of query, key and value, config.attention_bias unless given. out_bias: of the output, else as `bias`.
        """
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = self.types_of_layers(config)[layer_idx]
        sizes = config_of_layer(config, layer_idx)
        self.num_heads = sizes.num_attention_heads
        self.num_key_value_heads = getattr(sizes, "num_key_value_heads", None) or self.num_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = getattr(sizes, "head_dim", None) or config.hidden_size // self.num_heads
        self.scaling = self.head_dim**-0.5 if scaling is None else scaling
        self.attention_dropout = getattr(config, "attention_dropout", 0.0)
        self.use_rope = True  # False for layers without rotary positions
        self.sliding_window = window_of(config, self.layer_type)
        # only the features the layer has: a user's attention function need not accept the others
        given = {"sliding_window": self.sliding_window, "softcap": softcap}
        self._features = {name: value for name, value in given.items() if value is not None}
        bias = config.attention_bias if bias is None else bias
        self.make_projections(bias, bias if out_bias is None else out_bias)
        self.lay_projections()

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        """The modules `project` and `project_output` call, under the names and in the order of transformers."""
        hidden, width, kv_width = self.config.hidden_size, self.num_heads, self.num_key_value_heads
        width, kv_width = width * self.head_dim, kv_width * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=bias)
        setattr(self, self.output_name, nn.Linear(width, hidden, bias=out_bias))

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, T, D) -> query (B, T, H, head_dim), key, value (B, T, K, head_dim); any more go to `project_output`."""
        batch, length, _ = hidden_states.shape
        query, key, value = self.projections(hidden_states)
        if value.requires_grad and value.is_cpu:
            value = value.contiguous()  # it is kept for the backward pass, and would keep all of a joint product
        shape = (batch, length, -1, self.head_dim)
        return query.view(shape), key.view(shape), value.view(shape)

    def rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        position_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query (B, T, H, head_dim) and key (B, T, K, head_dim) rotated by their positions, where the layer has rotary
        positions.

        position_embeddings: cos and sin (B or 1, T, R). position_ids (B or 1, T): what they were made of.
        """
        if position_embeddings is None or not self.use_rope:
            return query, key
        cos, sin = position_embeddings
        if not self.interleaved and untouched():
            turned = rotary.try_cpp(query, key, cos, sin)
            if turned is not None:
                return turned
        return rotary(query, key, cos, sin, interleaved=self.interleaved)

    @property
    def is_sliding(self) -> bool:
        return self.layer_type == SLIDING

    @property
    def rotary_ndims(self) -> int:
        """How much of a head rotates."""
        rope = self.config.rope_parameters or {}
        return int(self.head_dim * rope.get("partial_rotary_factor", 1.0))

    @property
    def attn_logit_softcapping(self) -> float | None:
        """The bound of the scores."""
        return self._features.get("softcap")

    @attn_logit_softcapping.setter
    def attn_logit_softcapping(self, bound: float | None) -> None:
        others = {name: value for name, value in self._features.items() if name != "softcap"}
        self._features = others if bound is None else others | {"softcap": bound}

    @property
    def score_scale(self) -> float:
        """The factor of the scores: `scaling`, where the queries are not scaled before."""
        return self.scaling

    def features(self) -> Mapping[str, Any]:
        """Keywords of the attention function besides the tensors, the scale and the dropout."""
        return self._features

    def features_of_pages(self, implementation: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The keywords of attention to the pages of a cache (`RaggedPagesCache`) themselves; None: not of this call.

        Another attention that was asked for gets its keys and values gathered, and so does one that returns weights.
        """
        weights = asked.get("output_attentions") or wants_attentions(self.config)
        if weights or self.training or implementation not in ("easytorch", "sdpa"):
            return None
        features = {"sinks" if name == "s_aux" else name: value for name, value in self.features().items()}
        if not features.keys() <= {"sinks", "sliding_window", "softcap"}:
            return None
        if self.layer_type == CHUNKED:
            features["chunk_size"] = self.config.attention_chunk_size
        return features | {"softmax_scale": self.score_scale}

    def attend_to_cache(
        self, cache: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, implementation: str,
        asked: Mapping[str, Any],
    ) -> torch.Tensor | None:  # fmt: skip
        """Attention by a cache that reads its keys and values where they lie, in pages or in few bits -> (B, T, H, Dv);
        None where it has none for this call, and nothing was written."""
        attend = getattr(cache, "attend_pages", None) or getattr(cache, "attend_codes", None)
        features = None if attend is None else self.features_of_pages(implementation, asked)
        if attend is None or features is None:
            return None
        attended: torch.Tensor | None = attend(query, key, value, self.layer_idx, **features)
        if attended is not None:
            observed(self)
        return attended

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """attended (B, T, H * head_dim), and whatever else `project` returned -> (B, T, D)."""
        return linear(getattr(self, self.output_name), attended)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, D), position_embeddings cos and sin (B, T, R) -> (B, T, D) and weights or None.

        cache: this layer's keys and values are appended to it, and all of its contents are attended to.
        """
        batch, length, _ = hidden_states.shape
        query, key, value, *rest = self.project(hidden_states)
        query, key = self.rotate(query, key, position_embeddings, kwargs.get("position_ids"))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        implementation = attn_implementation(self.config)
        if cache is not None:
            if attention_mask is None:
                attended = self.attend_to_cache(cache, query, key, value, implementation, kwargs)
                if attended is not None:
                    return self.project_output(attended.reshape(batch, length, -1), *rest), None
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        attend = interface_of(implementation)
        dropout = self.attention_dropout if self.training else 0.0
        features = self.features()
        scaling = self.score_scale
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **features, **kwargs
        )
        return self.project_output(output.reshape(batch, length, -1), *rest), weights
