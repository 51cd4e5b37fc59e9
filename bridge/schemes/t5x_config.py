"""config.json of a T5 family model in T5X's names, inferred from the shapes.

Not in the shapes: the activation of a gated MLP (gelu in every published T5X model), the distance at which relative
positions end (128 in all), and whether a LongT5 without global tokens is one: its local attention has T5's weights.
Models of which that is not true need their own config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from easytorch.bridge.core.tensor_info import TensorInfo

_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/pre_mlp_layer_norm/scale")
_EXPERTS = re.compile(r"(encoder|decoder)/layers_(\d+)/mlp/expert/wi/kernel")


def t5x_config(tree: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """The config, None where a size cannot be read."""
    words, scanned = tree.get("token_embedder/embedding"), "encoder/encoder/pre_mlp_layer_norm/scale" in tree
    inside = "encoder/encoder" if scanned else "encoder/layers_0"
    positions = tree.get("encoder/relpos_bias/rel_embedding") or tree.get(f"{inside}/relpos_bias/rel_embedding")
    query = tree.get(f"{inside}/attention/query/kernel")
    gated = f"{inside}/mlp/wi_0/kernel" in tree
    up = tree.get(f"{inside}/mlp/{'wi_0' if gated else 'wi'}/kernel")
    layers = {side: _layers(tree, side, scanned) for side in ("encoder", "decoder")}
    if words is None or positions is None or query is None or up is None or not layers["encoder"]:
        return None
    heads = positions.shape[0]
    across = 1
    for size in query.shape[1 + scanned :]:
        across *= size
    if len(words.shape) != 2 or not heads or across % heads:
        return None
    family, special = _family(tree, scanned, inside)
    encoder_only = not layers["decoder"]
    names = {"t5": "T5", "umt5": "UMT5", "longt5": "LongT5", "switch_transformers": "SwitchTransformers"}
    head = "EncoderModel" if encoder_only else "ForConditionalGeneration"
    return {
        "model_type": family,
        "architectures": [names[family] + head],
        "vocab_size": words.shape[0],
        "d_model": words.shape[1],
        "d_kv": across // heads,
        "d_ff": up.shape[-1],
        "num_heads": heads,
        "num_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"] or layers["encoder"],
        "relative_attention_num_buckets": positions.shape[-1],
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": "decoder/logits_dense/kernel" not in tree,
        "is_encoder_decoder": not encoder_only,
        **special,
    }


def _layers(tree: Mapping[str, TensorInfo], side: str, scanned: bool) -> int:
    if scanned:
        norm = tree.get(f"{side}/{side}/pre_mlp_layer_norm/scale")
        return norm.shape[-1] if norm is not None else 0
    return sum(1 for name in tree if (found := _LAYER.fullmatch(name)) is not None and found[1] == side)


def _family(tree: Mapping[str, TensorInfo], scanned: bool, inside: str) -> tuple[str, dict[str, Any]]:
    """The family, by what only it has, and the settings that go with that."""
    if f"{inside}/relpos_bias/rel_embedding" in tree:
        return "umt5", {}
    if f"{inside}/attention/T5LayerNorm_0/scale" in tree:
        return "longt5", {"encoder_attention_type": "transient-global"}
    experts = {found[1] + found[2]: info for name, info in tree.items() if (found := _EXPERTS.fullmatch(name))}
    if not experts:
        return "t5", {}
    count = {side: sum(1 for one in experts if one.startswith(side)) for side in ("encoder", "decoder")}
    return "switch_transformers", {
        "num_experts": next(iter(experts.values())).shape[0],
        "num_sparse_encoder_layers": count["encoder"],
        "num_sparse_decoder_layers": count["decoder"],
    }
