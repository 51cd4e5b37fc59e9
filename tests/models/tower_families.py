"""The rows of native towers, and what each of their heads is given: see families.py, which has the other families."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.models.family import Family
from tests.models.image_text_families import (
    GEMMA4_AUDIO,
    GEMMA4_VISION,
    gemma4_images,
    image_text_inputs,
    image_text_labels,
)

_TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {"image_size": 12, "patch_size": 4, "num_channels": 3}
_VISION = _TOWER | _IMAGE
_TEXT = _TOWER | {
    "vocab_size": 97,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 7,
}
_CLIP_TEXT, _CLIP_VISION = _TEXT | {"projection_dim": 16}, _VISION | {"hidden_size": 24, "projection_dim": 16}
_SIGLIP_TEXT, _SIGLIP_VISION = _TEXT | {"projection_size": 24}, _VISION | {"hidden_size": 24}
_SIGLIP2_VISION = _TOWER | {"hidden_size": 24, "patch_size": 4, "num_channels": 3, "num_patches": 16}
_DINO_VARIANTS = (
    {"out_indices": [0, 2], "apply_layernorm": False, "reshape_hidden_states": False},
    {"layerscale_value": 0.3, "hidden_act": "relu", "patch_size": 3},
)


def _tower(
    config: str,
    *heads: str,
    sizes: dict[str, Any],
    variants: tuple[dict[str, Any], ...] = (),
    dropouts: tuple[str, ...] = (),
    reference: str = "sdpa",
) -> Family:
    kind = getattr(transformers, f"{config}Config")
    return Family(kind, heads, sizes, reference, variants=variants, dropouts=dropouts)


TOWER_FAMILIES = {
    "vit": _tower(
        "ViT",
        "ViTModel",
        "ViTForImageClassification",
        "ViTForMaskedImageModeling",
        sizes=_VISION | {"encoder_stride": 4},
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        variants=(
            {"qkv_bias": False, "num_labels": 0, "hidden_act": "relu"},
            {"hidden_size": 30, "patch_size": 5, "pooler_output_size": 7, "pooler_act": "relu"},
            {"patch_size": [4, 4], "image_size": [12, 12]},
        ),
    ),
    "dinov2": _tower(
        "Dinov2",
        "Dinov2Model",
        "Dinov2ForImageClassification",
        "Dinov2Backbone",
        sizes={name: size for name, size in _VISION.items() if name != "intermediate_size"} | {"mlp_ratio": 2},
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"),
        variants=(*_DINO_VARIANTS, {"use_swiglu_ffn": True, "qkv_bias": False, "use_mask_token": False}),
    ),
    "dinov3_vit": _tower(
        "DINOv3ViT",
        "DINOv3ViTModel",
        "DINOv3ViTBackbone",
        sizes=_VISION | {"num_register_tokens": 2, "pos_embed_rescale": None},
        dropouts=("attention_dropout", "drop_path_rate"),
        variants=(
            *_DINO_VARIANTS,
            {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True, "proj_bias": False},
            {"num_register_tokens": 0, "mlp_bias": False, "query_bias": False, "return_class_token": True},
        ),
    ),
    "pixtral": _tower(
        "PixtralVision",
        "PixtralVisionModel",
        sizes=_VISION,
        dropouts=("attention_dropout",),
        variants=({"hidden_act": "silu", "patch_size": 3},),
    ),
    "clip_text_model": _tower(
        "CLIPText",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        sizes=_CLIP_TEXT,
        dropouts=("attention_dropout",),
        variants=({"eos_token_id": 2, "hidden_act": "gelu"},),
    ),
    "clip_vision_model": _tower(
        "CLIPVision",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        sizes=_CLIP_VISION,
        dropouts=("attention_dropout",),
        variants=({"hidden_act": "gelu", "patch_size": 5},),
    ),
    "clip": _tower(
        "CLIP",
        "CLIPModel",
        "CLIPForImageClassification",
        sizes={"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 16},
        variants=({"num_labels": 0}, {"projection_dim": 8, "logit_scale_init_value": 1.0}),
    ),
    "siglip_text_model": _tower(
        "SiglipText",
        "SiglipTextModel",
        sizes=_SIGLIP_TEXT,
        dropouts=("attention_dropout",),
        variants=({"projection_size": None, "hidden_act": "gelu"},),
    ),
    "siglip_vision_model": _tower(
        "SiglipVision",
        "SiglipVisionModel",
        sizes=_SIGLIP_VISION,
        dropouts=("attention_dropout",),
        variants=({"vision_use_head": False, "patch_size": 5},),
    ),
    "siglip": _tower(
        "Siglip",
        "SiglipModel",
        "SiglipForImageClassification",
        sizes={"text_config": _SIGLIP_TEXT, "vision_config": _SIGLIP_VISION},
        variants=({"num_labels": 0},),
    ),
    "siglip2_text_model": _tower(
        "Siglip2Text", "Siglip2TextModel", sizes=_SIGLIP_TEXT, dropouts=("attention_dropout",)
    ),
    "siglip2_vision_model": _tower(
        "Siglip2Vision",
        "Siglip2VisionModel",
        sizes=_SIGLIP2_VISION,
        dropouts=("attention_dropout",),
        variants=({"vision_use_head": False, "num_patches": 9},),
    ),
    "siglip2": _tower(
        "Siglip2",
        "Siglip2Model",
        "Siglip2ForImageClassification",
        sizes={"text_config": _SIGLIP_TEXT, "vision_config": _SIGLIP2_VISION},
        variants=({"num_labels": 0},),
    ),
}
TOWER_FAMILIES |= {
    "gemma4_vision": _tower(
        "Gemma4Vision",
        "Gemma4VisionModel",
        sizes=GEMMA4_VISION,
        dropouts=("attention_dropout",),
        variants=(
            {"use_clipped_linears": True, "standardize": True, "hidden_activation": "silu"},
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}, "num_key_value_heads": 4},
        ),
    ),
    "gemma4_audio": _tower(
        "Gemma4Audio",
        "Gemma4AudioModel",
        sizes=GEMMA4_AUDIO,
        reference="eager",
        variants=(
            {"use_clipped_linears": False, "attention_context_right": 0, "attention_chunk_size": 5},
            {"gradient_clipping": 0.7, "residual_weight": 0.3, "conv_kernel_size": 2, "attention_logit_cap": 2.0},
        ),
    ),
}
# An encoder of sound, whose decoder's caches and tokens test_whisper.py has.
TOWER_FAMILIES["whisper"] = _tower(
    "Whisper",
    "WhisperModel",
    "WhisperForConditionalGeneration",
    "WhisperForCausalLM",
    "WhisperForAudioClassification",
    sizes={
        "vocab_size": 97,
        "num_mel_bins": 6,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 37,
        "decoder_ffn_dim": 48,
        "max_source_positions": 9,
        "max_target_positions": 40,
        "classifier_proj_size": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "begin_suppress_tokens": None,
    },
    dropouts=("dropout", "activation_dropout", "attention_dropout"),
    variants=(
        {"activation_function": "relu", "decoder_layers": 3, "tie_word_embeddings": False},
        {"decoder_attention_heads": 8, "encoder_layers": 3, "use_cache": False},
    ),
)
TWO_TOWERS = ("clip", "siglip", "siglip2")
# The head that stands for a family where one is enough.
TOWER_HEADS = {family: row.heads[0] for family, row in TOWER_FAMILIES.items()} | {
    "vit": "ViTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
_HEADS = {head: family for family, row in TOWER_FAMILIES.items() for head in row.heads}


SAID = torch.tensor([[7, 41, 9, 22, 63, 80, 15], [50, 3, 77, 14, 29, 61, 8]])


def sound(mels: int = 6, frames: int = 18, seed: int = 1) -> torch.Tensor:
    """Two spectrograms (2, mels, frames); with mels=32, states of an encoder (2, frames, mels)."""
    drawn = torch.randn(2, mels, frames, generator=torch.Generator().manual_seed(seed))
    return drawn.transpose(1, 2) if mels == 32 else drawn


def image(height: int = 12, width: int = 12, seed: int = 1) -> torch.Tensor:
    """Two images (2, 3, height, width)."""
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


def tower_inputs(head: str) -> dict[str, torch.Tensor] | None:
    """What a forward of the class `head` is given; None for a class that takes no images and is no tower."""
    if (given := image_text_inputs(head)) is not None:
        return given
    if head not in _HEADS:
        return None
    if head == "Gemma4VisionModel":
        images = gemma4_images()
        return {"pixel_values": images["pixel_values"], "pixel_position_ids": images["image_position_ids"]}
    if head == "Gemma4AudioModel":
        return {
            "input_features": sound(8, 37).transpose(1, 2),
            "attention_mask": torch.arange(37) < torch.tensor([[37], [20]]),
        }
    if head.startswith("Whisper"):
        said = {"input_ids" if head == "WhisperForCausalLM" else "decoder_input_ids": SAID}
        if head == "WhisperForCausalLM":
            return said | {"encoder_outputs": sound(32, 9)}
        return {"input_features": sound()} | ({} if "Classification" in head else said)
    text: dict[str, torch.Tensor] = {}
    if "Text" in head or head in ("CLIPModel", "SiglipModel", "Siglip2Model"):
        ids = torch.tensor([[5, 9, 33, 71, 8, 12, 3, 44, 90, 7], [4, 4, 90, 12, 7, 60, 0, 0, 0, 0]])
        text = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    if "Text" in head:
        return text
    if not head.startswith("Siglip2"):
        return text | {"pixel_values": image()}
    patches = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 12, [1] * 6 + [0] * 6])
    shapes = torch.tensor([[3, 4], [2, 3]])
    return text | {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def tower_labels(head: str) -> dict[str, Any]:
    """What makes a forward of the class `head` compute a loss; empty where it has none."""
    if image_text_inputs(head) is not None:
        return image_text_labels(head)
    if head in ("WhisperForConditionalGeneration", "WhisperForCausalLM"):
        return {"labels": SAID.masked_fill(SAID == 77, -100)}
    if head.endswith(("ForImageClassification", "ForAudioClassification")):
        return {"labels": torch.tensor([1, 0])}
    if "ForMaskedImageModeling" in head:
        return {"bool_masked_pos": torch.tensor([[True, False, False] * 3, [False, True, True] * 3])}
    return {"return_loss": True} if head in ("CLIPModel", "SiglipModel", "Siglip2Model") else {}


def tensors(output: Any) -> list[torch.Tensor]:
    """Every floating tensor of an output, those of the outputs and tuples inside it too."""
    values = output.values() if hasattr(output, "values") else output
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += [value] if value.is_floating_point() else []
        elif value is not None and not isinstance(value, str | int | float | transformers.Cache):
            found += tensors(value)
    return found
