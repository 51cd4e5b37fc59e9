"""Attention whose last layers have no keys and values of their own: they read an earlier layer's (arXiv:2405.12981)."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache

from easytorch.cache_names import takes_cache
from easytorch.layers.attention import interface_of, observed
from easytorch.layers.config import attn_implementation
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.rotary import rotary
from easytorch.layers.stock_names import same_as

# By type of layer: the keys (B, K, S, head_dim) and values of the layer that the last ones of that type read.
SharedKeys = MutableMapping[str, tuple[torch.Tensor, torch.Tensor]]


def check_sharing(config: Any) -> None:
    """`ValueError` unless each layer without keys finds an earlier one of its type that has them."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if not isinstance(shared, int) or not 0 <= shared <= layers:
        raise ValueError(
            f"{config.model_type}: config.num_kv_shared_layers={shared!r} must be an integer from 0 to "
            f"num_hidden_layers={layers}"
        )
    own = config.layer_types[: layers - shared]
    if shared and (missing := sorted(set(config.layer_types) - set(own))):
        raise ValueError(
            f"{config.model_type}: config.num_kv_shared_layers={shared} leaves no {', '.join(missing)} layer with keys "
            f"of its own among the first {len(own)}, whose keys the last layers of that type are to read"
        )


class SharedKeysAttention(GroupedAttention):
    """`GroupedAttention` that `config.kv_sharing_modes` makes give its keys to later layers of its type, "store", or
    read those of an earlier one, "reuse"; None: neither.

    A family's `make_projections` begins with `set_sharing`; `project` gives query, key and value, or the query alone
    where `reads` is set. Legend: B batch, T tokens, S tokens in the cache too, D hidden size, H query heads, K
    key/value heads.
    """

    is_kv_shared_layer = same_as("reads")
    store_full_length_kv = same_as("gives")
    reads: bool
    gives: bool
    source: int

    def set_sharing(self) -> None:
        """Sets `reads`, `gives`, and `source`: the layer whose keys this one attends to."""
        modes, types = self.config.kv_sharing_modes, self.config.layer_types
        self.reads, self.gives = (modes[self.layer_idx] == mode for mode in ("reuse", "store"))
        self.source = self.layer_idx
        if self.reads:
            own = types[self.layer_idx]
            givers = [index for index, mode in enumerate(modes) if mode == "store" and types[index] == own]
            self.source = givers[-1]

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        shared_kv_states: SharedKeys | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `GroupedAttention`; shared_kv_states: what layers of this call have given, and this one adds to."""
        if not (self.reads or self.gives):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        assert shared_kv_states is not None, "the model passes one"
        batch, length, _ = hidden_states.shape
        query, *own = self.project(hidden_states)
        key: torch.Tensor | None = None
        value: torch.Tensor | None = None
        if self.reads:
            if position_embeddings is not None:
                query, _ = rotary(query, query[:, :, :1], *position_embeddings)
        else:
            query, rotated = self.rotate(query, own[0], position_embeddings, kwargs.get("position_ids"))
            key, value = rotated.transpose(1, 2), own[1].transpose(1, 2)
        query = query.transpose(1, 2)
        pages: Any = cache if attention_mask is None and hasattr(cache, "attend_pages") else None
        of_pages = None if pages is None else self.features_of_pages(attn_implementation(self.config), kwargs)
        if of_pages is not None:
            observed(self)
            paged = pages.attend_pages(query, key, value, self.source, **of_pages)
            return self.project_output(paged.reshape(batch, length, -1)), None
        if key is None or value is None:
            key, value = shared_kv_states[self.layer_type]
        else:
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
            shared_kv_states[self.layer_type] = key, value
        attend = interface_of(attn_implementation(self.config))
        dropout = self.attention_dropout if self.training else 0.0
        features = {"scaling": self.scaling, "dropout": dropout, **self.features(), **kwargs}
        output, weights = attend(self, query, key, value, attention_mask, **features)
        return self.project_output(output.reshape(batch, length, -1)), weights


def without_reentrant_checkpoints(model: nn.Module) -> None:
    """Layers of `model` that give or read shared keys get non-reentrant checkpoints, with one warning, where theirs
    were reentrant: those know gradients of a layer's own arguments alone, and would lose those of the keys."""
    attentions = [module for module in model.modules() if isinstance(module, SharedKeysAttention)]
    if not any(attention.reads for attention in attentions):
        return
    changed = 0
    layer: Any
    for layer in model.modules():
        attention, checkpoint = getattr(layer, "self_attn", None), getattr(layer, "_gradient_checkpointing_func", None)
        if not isinstance(attention, SharedKeysAttention) or not (attention.reads or attention.gives):
            continue
        if isinstance(checkpoint, partial) and checkpoint.keywords.get("use_reentrant"):
            keywords: dict[str, Any] = {**checkpoint.keywords, "use_reentrant": False}
            layer._gradient_checkpointing_func = partial(checkpoint.func, *checkpoint.args, **keywords)
            changed += 1
    if changed:
        warnings.warn(
            f"{changed} layers give keys to others or read those of others, whose gradients a reentrant checkpoint "
            f'would lose: these layers use {{"use_reentrant": False}}',
            stacklevel=2,
        )
