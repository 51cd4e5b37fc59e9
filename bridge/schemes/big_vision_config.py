"""config.json of a ViT or SigLIP in big_vision's names, inferred from the shapes.

Heads are an axis of the kernels, the patch size that of the first convolution, the image size the square root of the
number of positions. Not in the shapes, but the same in all of Google's models: flax's LayerNorm has epsilon
1e-6, and its gelu is the tanh approximation, which transformers' own ViT configs replace by the exact one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from easytorch.bridge.core.tensor_info import TensorInfo

_BLOCK = re.compile(r"encoderblock(?:_(\d+))?/MultiHeadDotProductAttention_\d+/query/kernel")
_MLP = re.compile(r"encoderblock(?:_0)?/MlpBlock_\d+/Dense_0/kernel")
_POSITION = re.compile(r"(?:Transformer/)?(?:posembed_input/)?pos_embedding")


def vit_config(tree: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Of a ViT; None where the shapes are not those of transformers' one (another patch, no class token)."""
    encoder, image = _encoder(tree, "Transformer/"), _image(tree, "")
    if encoder is None or image is None or "cls" not in tree:
        return None
    head = tree.get("head/kernel")
    labels = head.shape[-1] if head is not None else 0
    classifies = head is not None or "pre_logits/kernel" not in tree
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if classifies else "ViTModel"],
        **encoder,
        **image,
        "qkv_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(label): f"LABEL_{label}" for label in range(labels)},
        "label2id": {f"LABEL_{label}": label for label in range(labels)},
    }


def siglip_config(tree: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """config.json of a SigLIP with both towers."""
    vision, image = _encoder(tree, "img/Transformer/"), _image(tree, "img/")
    text, words, head = _encoder(tree, "txt/Encoder_0/"), tree.get("txt/Embed_0/embedding"), tree.get("txt/head/kernel")
    positions = tree.get("txt/pos_embedding")
    if vision is None or image is None or text is None or words is None or head is None or positions is None:
        return None
    return {
        "model_type": "siglip",
        "architectures": ["SiglipModel"],
        "vision_config": {"model_type": "siglip_vision_model", **vision, **image},
        "text_config": {
            "model_type": "siglip_text_model",
            **text,
            "vocab_size": words.shape[0],
            "max_position_embeddings": positions.shape[-2],
            "projection_size": head.shape[-1],
        },
    }


def _encoder(tree: Mapping[str, TensorInfo], prefix: str) -> dict[str, int] | None:
    """Width, heads, layers and width of the MLP of the blocks under `prefix`."""
    inside = {name.removeprefix(prefix): info for name, info in tree.items() if name.startswith(prefix)}
    queries = {found[1]: inside[name] for name in inside if (found := _BLOCK.fullmatch(name))}
    mlp = next((info for name, info in inside.items() if _MLP.fullmatch(name)), None)
    if not queries or mlp is None:
        return None
    query = next(iter(queries.values()))
    scanned = None in queries
    if len(query.shape) != 3 + scanned or query.shape[-1] * query.shape[-2] != query.shape[-3]:
        return None
    return {
        "hidden_size": query.shape[-3],
        "num_attention_heads": query.shape[-2],
        "num_hidden_layers": query.shape[0] if scanned else len(queries),
        "intermediate_size": mlp.shape[-1],
    }


def _image(tree: Mapping[str, TensorInfo], prefix: str) -> dict[str, int] | None:
    """Size, patch and channels of the image."""
    kernel = tree.get(f"{prefix}embedding/kernel")
    positions = next(
        (info for name, info in tree.items() if name.startswith(prefix) and _POSITION.fullmatch(name[len(prefix) :])),
        None,
    )
    if kernel is None or positions is None or len(kernel.shape) != 4 or len(positions.shape) != 3:
        return None
    side = math.isqrt(positions.shape[1])
    if kernel.shape[0] != kernel.shape[1] or positions.shape[1] - side**2 not in (0, 1):
        return None
    return {"image_size": side * kernel.shape[0], "patch_size": kernel.shape[0], "num_channels": kernel.shape[2]}
