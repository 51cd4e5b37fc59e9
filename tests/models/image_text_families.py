"""The rows of native models of images and text, and what each of their heads is given: see families.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.models.family import Family

IMAGE_TOKEN, VIDEO_TOKEN = 96, 95
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
_PIXTRAL = _VISION | {"model_type": "pixtral", "hidden_size": 32, "patch_size": 2}
# 6 x 6 patches of 32 numbers, of which 2 x 2 become a token of 128.
_LLAMA4_VISION = _VISION | {
    "hidden_size": 32,
    "patch_size": 2,
    "intermediate_size": 128,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "vision_output_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_LLAMA4 = _TEXT | {
    "model_type": "llama4_text",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 5,
    "floor_scale": 2,
}
_GEMMA = _TEXT | {
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
# 2 x 2 patches of 2 x 2 pixels are a token; a token of sound attends to 2 before it and 2 after.
GEMMA4_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "position_embedding_size": 20,
}
GEMMA4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "attention_chunk_size": 3,
    "attention_context_left": 4,
    "attention_context_right": 3,
    "output_proj_dims": 20,
}
_GEMMA4 = _TEXT | {
    "head_dim": 8,
    "num_hidden_layers": 3,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 1,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "per_layer_config": {1: {"head_dim": 12}, 2: {"head_dim": 12}},
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,
}
_GEMMA4_ALONE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
# Patches of 2 x 2 pixels in 2 frames; a square of 2 x 2 of them is a token.
_PATCHES = {"depth": 3, "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2}
_PATCHES |= {"spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_OTHER_ROPE = {"type": "mrope", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_QWEN = _TEXT | {"rope_parameters": _ROPE}
_QWEN3 = _QWEN | {"head_dim": 8, "num_hidden_layers": 3}
_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "tie_word_embeddings": False}
_QWEN2_VISION = _PATCHES | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
_QWEN2_5_VISION = _PATCHES | {"hidden_size": 16, "intermediate_size": 40, "out_hidden_size": 32}
_QWEN2_5_VISION |= {"window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2}
_QWEN3_VISION = _PATCHES | {"hidden_size": 16, "intermediate_size": 40, "out_hidden_size": 32}
_QWEN3_VISION |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN3_5_VISION = {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
_QWEN3_5 = _TEXT | {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 1.0},
}
_QWEN3_5_MOE = {name: size for name, size in _QWEN3_5.items() if name != "intermediate_size"} | _EXPERTS
_QWEN3_5_MOE |= {"shared_expert_intermediate_size": 40, "num_experts": 3}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
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
    "gemma4": Family(
        Gemma4Config,
        ("Gemma4Model", "Gemma4ForConditionalGeneration"),
        {
            "vision_config": GEMMA4_VISION,
            "text_config": _GEMMA4,
            "audio_config": GEMMA4_AUDIO,
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": VIDEO_TOKEN,
            "audio_token_id": 94,
            "tie_word_embeddings": False,
        },
        reference={"text_config": "sdpa", "vision_config": "sdpa", "audio_config": "eager"},
        attentions=3,
        variants=(
            {"text_config": _GEMMA4 | {"use_bidirectional_attention": None}, "tie_word_embeddings": True},
            {"vision_config": GEMMA4_VISION | {"use_clipped_linears": True, "standardize": True}},
            {"text_config": _GEMMA4 | _GEMMA4_ALONE | {"use_bidirectional_attention": "all"}, "audio_config": None},
        ),
    ),
    "llama4": Family(
        Llama4Config,
        ("Llama4ForConditionalGeneration",),
        {"vision_config": _LLAMA4_VISION, "text_config": _LLAMA4, "image_token_index": IMAGE_TOKEN},
        variants=(
            {"text_config": _LLAMA4 | {"output_router_logits": True, "interleave_moe_layer_step": 1}},
            {"vision_config": _LLAMA4_VISION | {"patch_size": 4, "pixel_shuffle_ratio": 1.0, "intermediate_size": 32}},
        ),
    ),
    "mistral3": Family(
        Mistral3Config,
        ("Mistral3Model", "Mistral3ForConditionalGeneration"),
        {
            "vision_config": _PIXTRAL,
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": 5, "head_dim": 8},
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
        },
        variants=(
            {"vision_feature_layer": -2, "projector_hidden_act": "relu", "multimodal_projector_bias": True},
            {"tie_word_embeddings": True, "vision_config": _PIXTRAL | {"patch_size": 4}, "spatial_merge_size": 1},
        ),
    ),
    "qwen2_vl": Family(
        Qwen2VLConfig,
        ("Qwen2VLModel", "Qwen2VLForConditionalGeneration"),
        _TOKENS | {"vision_config": _QWEN2_VISION, "text_config": _QWEN},
        variants=(
            {"vision_config": _QWEN2_VISION | {"hidden_act": "gelu", "num_heads": 4}, "tie_word_embeddings": True},
            {"vision_config": _QWEN2_VISION | {"temporal_patch_size": 1, "in_channels": 6}},
            {"text_config": _QWEN | {"rope_parameters": _OTHER_ROPE}},
        ),
    ),
    "qwen2_5_vl": Family(
        Qwen2_5_VLConfig,
        ("Qwen2_5_VLModel", "Qwen2_5_VLForConditionalGeneration"),
        _TOKENS | {"vision_config": _QWEN2_5_VISION, "text_config": _QWEN},
        variants=(
            {"vision_config": _QWEN2_5_VISION | {"window_size": 4, "fullatt_block_indexes": []}},
            {"vision_config": _QWEN2_5_VISION | {"window_size": 12, "hidden_act": "gelu"}, "tie_word_embeddings": True},
            {"text_config": _QWEN | _WINDOWS},
        ),
    ),
    "qwen3_vl": Family(
        Qwen3VLConfig,
        ("Qwen3VLModel", "Qwen3VLForConditionalGeneration"),
        _TOKENS | {"vision_config": _QWEN3_VISION, "text_config": _QWEN3},
        attentions=3,
        variants=(
            {"vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1, 2]}},  # a layer each
            {"vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": []}, "tie_word_embeddings": True},
            {"vision_config": _QWEN3_VISION | {"num_position_embeddings": 9, "hidden_act": "gelu"}},
            {"text_config": _QWEN3 | {"attention_bias": True, "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}},
        ),
    ),
    "qwen3_vl_moe": Family(
        Qwen3VLMoeConfig,
        ("Qwen3VLMoeModel", "Qwen3VLMoeForConditionalGeneration"),
        _TOKENS | {"vision_config": _QWEN3_VISION, "text_config": _QWEN3 | _EXPERTS},
        attentions=3,
        variants=(
            {"text_config": _QWEN3 | _EXPERTS | {"mlp_only_layers": [1], "output_router_logits": True}},
            {"text_config": _QWEN3 | _EXPERTS | {"decoder_sparse_step": 2, "attention_bias": True}},
        ),
    ),
    "qwen3_5": Family(
        Qwen3_5Config,
        (
            "Qwen3_5Model",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5ForSequenceClassification",
            "Qwen3_5ForTokenClassification",
        ),
        _TOKENS | {"vision_config": _QWEN3_5_VISION, "text_config": _QWEN3_5},
        attentions=1,
        variants=(
            {"vision_config": _QWEN3_5_VISION | {"num_position_embeddings": 9, "hidden_act": "gelu"}},
            {"text_config": _QWEN3_5 | {"attention_bias": True}, "tie_word_embeddings": True},
        ),
    ),
    "qwen3_5_moe": Family(
        Qwen3_5MoeConfig,
        ("Qwen3_5MoeModel", "Qwen3_5MoeForConditionalGeneration"),
        _TOKENS | {"vision_config": _QWEN3_5_VISION, "text_config": _QWEN3_5_MOE},
        attentions=1,
        variants=({"text_config": _QWEN3_5_MOE | {"output_router_logits": True}, "tie_word_embeddings": True},),
    ),
}
# Families whose images are patches of any number, with the grid of each.
FRAMES_APART = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # with text between the frames of a video
OF_GRIDS = ("qwen2_vl", "qwen2_5_vl", *FRAMES_APART)
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
    given |= images(_HEADS[head])
    if _HEADS[head] == "gemma3":
        given["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if _HEADS[head] in (*OF_GRIDS, "gemma4"):
        given["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    return given


def images(family: str, count: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Images of 9 tokens each, as the family takes them."""
    generator = torch.Generator().manual_seed(seed)
    if family == "gemma4":
        return gemma4_images(count, seed)
    if family not in OF_GRIDS:
        given = {"pixel_values": torch.randn(count, 3, 12, 12, generator=generator)}
        return given | ({"image_sizes": torch.tensor([[12, 12]] * count)} if family == "mistral3" else {})
    grids = torch.tensor([[1, 6, 6], [1, 2, 18]])[torch.arange(count) % 2]
    return {"pixel_values": torch.randn(36 * count, 24, generator=generator), "image_grid_thw": grids}


def gemma4_images(count: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Gemma 4's images: 6 x 6 patches, then 2 x 18, each with 8 of padding."""
    grids = [(6, 6), (2, 18)] * count
    places = torch.stack([torch.cartesian_prod(*map(torch.arange, grid)).flip(1) for grid in grids[:count]])
    places = torch.nn.functional.pad(places, (0, 0, 0, 8), value=-1)
    pixels = torch.rand(count, 44, 12, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_position_ids": places}


def first_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """The first row of a batch of one image a row."""
    rows = {name: one[:1] for name, one in inputs.items()}
    if "image_sizes" in inputs:
        rows["image_sizes"] = inputs["image_sizes"][:1]
    if "image_grid_thw" in inputs:
        rows["pixel_values"] = inputs["pixel_values"][: inputs["image_grid_thw"][0].prod()]
    return rows


def image_text_labels(head: str) -> dict[str, Any]:
    """What makes a forward of the class `head` compute a loss; empty where it has none."""
    if "SequenceClassification" in head:
        return {"labels": torch.tensor([1, 0])}
    ids = (image_text_inputs(head) or {})["input_ids"]
    if "TokenClassification" in head:
        return {"labels": (ids % 2).masked_fill(ids == 0, -100)}
    ignored = (ids == 0) | (ids == IMAGE_TOKEN)
    return {} if head.endswith("Model") else {"labels": ids.masked_fill(ignored, -100)}
