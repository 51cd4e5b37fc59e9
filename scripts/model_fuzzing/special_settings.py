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


_AMENDED = {"gemma4_text": _gemma4}
