"""Checks of a config before a model is built from it, for values that would fail deep inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

# Counts, and the least that each may be. A config that lacks one, or has None there, has a default for it.
_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "intermediate_size": 0,
    "max_position_embeddings": 1,
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "num_experts": 1,
    "num_local_experts": 1,
    "n_routed_experts": 1,
    "decoder_sparse_step": 1,
    "word_embed_proj_dim": 1,
    "ffn_dim": 0,
    "n_inner": 0,
    "embed_dim": 1,
    "num_channels": 1,
    "patch_size": 1,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 1,
    "linear_head_dim": 1,
    "linear_num_heads": 1,
    "kv_lora_rank": 1,
    "time_step_rank": 1,
}
# What a count that none of the above is ends with, of which 0 may be one and a negative number is none.
_COUNTED = (
    *("_size", "_dim", "_rank", "_heads", "_experts", "_kernel", "_groups", "_channels", "_layers", "_tokens"),
    *("_state", "_conv", "_input", "_patches", "_dims", "_embeddings", "_ratio", "_per_image"),
)


def check_counts(config: PreTrainedConfig, least_counts: Mapping[str, int]) -> None:
    """`ValueError` for a count that is no integer or too small, and for heads that do not divide, of any layer.

    least_counts: the minimum of a count, for families whose minimum differs from `_LEAST`.
    """
    if config.is_heterogeneous:
        for of_layer in config.per_layer_config:
            check_counts(of_layer, least_counts)
        return
    for name, least in {**_LEAST, **least_counts}.items():
        value = getattr(config, name, None)
        if value is None or (isinstance(value, Sequence) and not isinstance(value, str)):  # one for each stage
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{config.model_type}: config.{name}={value!r} must be an integer of {least} or more")
    for name, value in vars(config).items():
        if name.endswith(_COUNTED) and isinstance(value, int | float) and value < 0:
            raise ValueError(f"{config.model_type}: config.{name}={value!r} must not be negative")
    for name in config.sub_configs:  # a projector is made of the widths of its parts, before they check the rest
        width = getattr(getattr(config, name, None), "hidden_size", None)
        if isinstance(width, int) and width < 1:
            raise ValueError(f"{config.model_type}: config.{name}.hidden_size={width} must be an integer of 1 or more")
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):
        return
    if isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"{config.model_type}: config.num_attention_heads={heads} must be a multiple of "
            f"config.num_key_value_heads={shared}"
        )
    hidden: Any = getattr(config, "hidden_size", None)
    if isinstance(hidden, int) and getattr(config, "head_dim", None) is None and hidden < heads:
        raise ValueError(
            f"{config.model_type}: config.hidden_size={hidden} is less than config.num_attention_heads={heads}"
        )


def padding_of(config: PreTrainedConfig) -> int | None:
    """`config.pad_token_id`, the row of the embedding that gets no gradient. `ValueError` if there is no such row."""
    padding: int | None = config.pad_token_id
    if padding is not None and not -config.vocab_size <= padding < config.vocab_size:
        raise ValueError(
            f"{config.model_type}: config.pad_token_id={padding} is not among the config.vocab_size="
            f"{config.vocab_size} tokens"
        )
    return padding
