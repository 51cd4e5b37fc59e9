"""The rows of native models of images and text, and what each of their heads is given: see families.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma3Config, LlavaConfig

from tests.models.family import Family

IMAGE_TOKEN = 96
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLIP, _LLAMA = (
    _VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
    _TEXT | {"model_type": "llama"},
)
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_GEMMA = _TEXT | {
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
IMAGE_TEXT_FAMILIES = {
    "llava": Family(
        LlavaConfig,
        ("LlavaModel", "LlavaForConditionalGeneration"),
        {"vision_config": _CLIP, "text_config": _LLAMA, "image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1},
        variants=(
            {"vision_feature_layer": -2, "projector_hidden_act": "relu", "multimodal_projector_bias": False},
            {"vision_feature_layer": [0, -2, 2], "tie_word_embeddings": True},
            {"vision_feature_select_strategy": "full", "vision_config": _SIGLIP},
            {"text_config": _TEXT | {"model_type": "qwen3", "head_dim": 8}},
            {"text_config": _TEXT | {"model_type": "mistral", "sliding_window": 5}},
        ),
    ),
    "gemma3": Family(
        Gemma3Config,
        ("Gemma3Model", "Gemma3ForConditionalGeneration", "Gemma3ForSequenceClassification"),
        {
            "vision_config": _SIGLIP,
            "text_config": _GEMMA,
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 9,
            "tie_word_embeddings": False,
        },
        variants=(
            {"text_config": _GEMMA | {"sliding_window": 12}, "tie_word_embeddings": True},
            {"vision_config": _SIGLIP | {"patch_size": 2}},  # 6 x 6 patches, means of 2 x 2
            {"text_config": _GEMMA | {"use_bidirectional_attention": True, "attention_bias": True}},
        ),
    ),
}
_HEADS = {head: family for family, row in IMAGE_TEXT_FAMILIES.items() for head in row.heads}


def image_text_inputs(head: str) -> dict[str, Any] | None:
    """A row of text around an image, and one with padding before it; None for another class."""
    if head not in _HEADS:
        return None
    tokens = 9
    first = [5, 9, *[IMAGE_TOKEN] * tokens, 33, 71, 8]
    second = [0, 0, 4, *[IMAGE_TOKEN] * tokens, 90, 12]
    ids = torch.tensor([first, second])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    given["pixel_values"] = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    if _HEADS[head] == "gemma3":
        given["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return given


def image_text_labels(head: str) -> dict[str, Any]:
    """What makes a forward of the class `head` compute a loss; empty where it has none."""
    if "SequenceClassification" in head:
        return {"labels": torch.tensor([1, 0])}
    ids = (image_text_inputs(head) or {})["input_ids"]
    ignored = (ids == 0) | (ids == IMAGE_TOKEN)
    return {} if head.endswith("Model") else {"labels": ids.masked_fill(ignored, -100)}
