"""Settings of decoders that only their family has, for scripts/fuzz_models.py."""

from __future__ import annotations

import random
from typing import Any


def amend(rng: random.Random, family: str, changes: dict[str, Any]) -> None:
    """Draws into `changes`, keywords of a config of `family`, what no other family has."""
    if family in _AMENDED:
        _AMENDED[family](rng, changes)


def _gemma4(rng: random.Random, changes: dict[str, Any]) -> None:
    """Heads of another width in full layers, keys of earlier layers, per-layer embeddings, and experts."""
    layers = changes["num_hidden_layers"] = rng.randint(1, 5)
    kinds = ("sliding_attention", "full_attention")
    changes["layer_types"] = [*(rng.choice(kinds) for _ in range(layers - 1)), "full_attention"]
    own = {kind: changes["layer_types"].index(kind) for kind in set(changes["layer_types"])}
    shared = rng.randint(0, layers - 1 - max(own.values())) if rng.random() < 0.95 else 2
    changes["num_kv_shared_layers"] = shared
    changes["head_dim"] = changes["head_dim"] or 8
    changes["global_head_dim"] = rng.choice((changes["head_dim"], 4, 12))
    changes["num_global_key_value_heads"] = rng.choice((None, 1))
    changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    # without per-layer parts transformers cannot leave positions out of the layers that share keys
    changes["hidden_size_per_layer_input"] = rng.choice((5, 8)) if shared or rng.random() < 0.6 else 0
    changes["rope_parameters"] = {
        kind: {"rope_type": kind_of_rope, "rope_theta": rng.choice((100.0, 1e4))} | more
        for kind, kind_of_rope, more in (
            ("sliding_attention", "default", {}),
            ("full_attention", "proportional", {"partial_rotary_factor": rng.choice((0.5, 1.0))}),
        )
    }
    changes["use_bidirectional_attention"] = rng.choice((None, None, "all", "vision"))
    if rng.random() < 0.4:
        experts = rng.randint(2, 5)
        changes |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": rng.randint(1, experts)}
        changes["moe_intermediate_size"] = rng.choice((8, 12))
    else:
        changes["enable_moe_block"] = False


def _llama4(rng: random.Random, changes: dict[str, Any]) -> None:
    """Chunks, layers without positions or experts, and the scale of queries by their places."""
    layers = changes["num_hidden_layers"]
    changes |= {"attention_chunk_size": rng.choice((1, 2, 3, 7, 40)), "intermediate_size_mlp": rng.choice((17, 24))}
    changes["moe_layers"] = rng.choice((None, [], [index for index in range(layers) if rng.random() < 0.5]))
    changes["layer_types"] = None
    if rng.random() < 0.3:
        changes["layer_types"] = [rng.choice(("chunked_attention", "full_attention")) for _ in range(layers)]
    changes |= {"floor_scale": rng.choice((1, 3, 8192)), "attn_scale": rng.choice((0.1, 0.7))}
    changes["head_dim"] = changes["head_dim"] or 8


def _deepseek_v32(rng: random.Random, changes: dict[str, Any]) -> None:
    """The indexer, and which layers have experts."""
    changes |= {"index_topk": rng.choice((1, 3, 6, 40)), "index_n_heads": rng.choice((3, 5))}
    changes["index_head_dim"] = rng.choice((8, 12))
    changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "longrope" in str(changes.get("rope_parameters")):  # drawn for heads of another width
        del changes["rope_parameters"]
    changes["layer_types"] = None
    kinds = ("dense", "sparse")
    changes["mlp_layer_types"] = rng.choice((None, [rng.choice(kinds) for _ in range(changes["num_hidden_layers"])]))


def _kimi_linear(rng: random.Random, changes: dict[str, Any]) -> None:
    """Layers with and without experts; transformers' class runs with a key of each head alone."""
    changes["mlp_layer_types"] = [rng.choice(("dense", "sparse")) for _ in range(changes["num_hidden_layers"])]
    changes["num_key_value_heads"] = changes["num_attention_heads"]


_AMENDED = {"gemma4_text": _gemma4, "llama4_text": _llama4, "deepseek_v32": _deepseek_v32, "kimi_linear": _kimi_linear}
