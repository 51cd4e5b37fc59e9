"""config.json of a Gemma, inferred from the shapes of DeepMind's checkpoint, which has none.

What shapes do not tell is the same in every model of a generation, or depends on its size. Source:
google-deepmind/gemma, `gm/nn/_gemma.py`, and for Gemma 1 its technical report; the keys are those of transformers'
configs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

_COMMON = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Width -> (sliding window, factor of the global rotary, maximum length) of the published Gemma 3 models.
_GEMMA_3 = {
    640: (512, 1.0, 32768),
    1152: (512, 1.0, 32768),
    2560: (1024, 8.0, 131072),
    3840: (1024, 8.0, 131072),
    5376: (1024, 8.0, 131072),
}
# Width and heads of the models whose scores are scaled by sqrt(D / N) instead of sqrt(head size): the 27B ones.
_BY_WIDTH = ((4608, 32), (5376, 32))
_VISION = "siglip_encoder/"


def gemma_config(shapes: Shapes) -> dict[str, Any] | None:
    """The config for the text model's leaves by path (without `transformer/`), None where the shapes do not tell it."""
    sizes = _text_sizes(shapes)
    if sizes is None:
        return None
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    scalar = width // heads if (width, heads) in _BY_WIDTH else sizes["head_dim"]
    if any(name.endswith("/attn/_query_norm/scale") for name in shapes):
        if width not in _GEMMA_3:
            return None
        return _gemma_3({**_COMMON, **sizes, "query_pre_attn_scalar": scalar}, shapes)
    config = {**_COMMON, **sizes, "rope_theta": 10000.0, "max_position_embeddings": 8192}
    if not any("post_attention_norm" in name for name in shapes):
        return {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], **config}
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        **config,
        "query_pre_attn_scalar": scalar,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _text_sizes(shapes: Shapes) -> dict[str, int] | None:
    """Layers, heads and widths."""
    layers, found = 0, {}
    for name, shape in shapes.items():
        place = re.match(r"(layer_|stacked_layers/attention_type_)(\d{1,6})/(.*?)(/w)?$", name)
        if place is None:
            continue
        stack = place[1] != "layer_"
        if place[3] == "pre_attention_norm/scale":
            layers += shape[0] if stack and shape else 1
        found[place[3]] = shape[1:] if stack else shape
    out, down = found.get("attn/attn_vec_einsum", ()), found.get("mlp/linear", ())
    keys = found.get("attn/kv_einsum", found.get("attn/qkv_einsum", ()))
    words = shapes.get("embedder/input_embedding", ())
    if len(out) != 3 or len(down) != 2 or len(keys) != 4 or len(words) != 2:
        return None
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": out[0],
        "head_dim": out[1],
        "hidden_size": out[2],
        "num_key_value_heads": keys[1],
        "intermediate_size": down[0],
        "vocab_size": words[0],
    }


def _gemma_3(text: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    window, factor, longest = _GEMMA_3[text["hidden_size"]]
    text |= {
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "max_position_embeddings": longest,
    }
    if factor != 1.0:
        text["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    vision = {name.partition(_VISION)[2]: shape for name, shape in shapes.items() if _VISION in name}
    if not vision:
        return {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **text}
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "mm_tokens_per_image": 256,
        "text_config": {"model_type": "gemma3_text", **text},
        "vision_config": _vision_config(vision),
    }


def _vision_config(shapes: Shapes) -> dict[str, Any]:
    block = "Transformer/encoderblock_0"
    patch, _, channels, width = shapes["embedding/kernel"]
    side = int(shapes["pos_embedding"][1] ** 0.5)
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": shapes[f"{block}/MlpBlock_0/Dense_0/kernel"][1],
        "num_attention_heads": shapes[f"{block}/MultiHeadDotProductAttention_0/query/kernel"][1],
        "num_hidden_layers": sum(name.endswith("/LayerNorm_0/scale") for name in shapes),
        "num_channels": channels,
        "patch_size": patch,
        "image_size": side * patch,
        "vision_use_head": False,
    }
