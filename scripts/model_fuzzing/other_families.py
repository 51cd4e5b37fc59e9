"""Random configs and inputs of encoders, encoder-decoders, and models of images and text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.models.families import ENCODERS, FAMILIES, IMAGE_TEXT, LANGUAGE, SEQ2SEQ
from tests.models.image_text_families import FRAMES_APART, OF_GRIDS

VOCABULARY, LONGEST = 61, 48
IMAGE, VIDEO = 59, 58  # the last tokens of a text are 1 to 57
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_WIDTHS = ("hidden_size", "dim", "d_model")
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_INNER = ("intermediate_size", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")
_VALUES: dict[str, tuple[Any, ...]] = {
    "layer_norm_eps": (1e-12, 1e-5, 1e-2),
    "norm_eps": (1e-5, 1e-2),
    "layer_norm_epsilon": (1e-6, 1e-2),
    "type_vocab_size": (1, 2),
    "embedding_size": (12, 24),
    "local_attention": (2, 6, 20),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu", "gelu"),
    "relative_attention_num_buckets": (4, 8, 32),
    "relative_attention_max_distance": (5, 20, 128),
    "d_kv": (4, 6, 9),
    "position_buckets": (-1, 4, 8, 24),
    "max_relative_positions": (-1, 6, 12),
    "pos_att_type": ("c2p", ["p2c"], ["p2c", "c2p"], None),
    "norm_rel_ebd": ("layer_norm", "none"),
    "conv_kernel_size": (0, 3),
    "classifier_pooling": ("cls", "mean"),
}
# What another test holds, or what makes another model of it.
_NOT_DRAWN = {"is_decoder", "add_cross_attention", "use_cache", "is_gated_act", "sparse_prediction"}
_NOT_DRAWN |= {"deterministic_flash_attn", "scale_decoder_outputs", "summary_use_proj", "tie_word_embeddings"}
_WITHOUT_LABELS = ("MultipleChoice", "ForPreTraining", "NextSentencePrediction", "LMHeadModel", "ForCausalLM")

DrawText = Callable[[random.Random, str], dict[str, Any]]  # the keywords of the config of a family of decoders

OTHERS = (*ENCODERS, *SEQ2SEQ, *IMAGE_TEXT)


def heads_of(family: str) -> list[str]:
    """The classes that are drawn: not those whose inputs have another form."""
    return [head for head in FAMILIES[family].heads if not head.endswith(_WITHOUT_LABELS)]


def draw_config(rng: random.Random, family: str, text: DrawText) -> dict[str, Any]:
    """Keywords of the family's config. text: what draws those of a family of decoders."""
    if family in OF_GRIDS:
        return _of_grids(rng, family, text)
    if family in IMAGE_TEXT:
        return _of_images(rng, family, text)
    return _of_text(rng, family)


def _of_text(rng: random.Random, family: str) -> dict[str, Any]:
    row = FAMILIES[family]
    names = vars(row.config())
    heads, dim = rng.choice((1, 2, 4, 6)), rng.choice((4, 6, 8, 10))
    changes: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": rng.choice((0, 0, 1, 40))}
    if family in SEQ2SEQ:
        changes["pad_token_id"] = 0
    known = row.sizes | _own(row.config_class)
    switches = {name for name in known if isinstance(names.get(name), bool)} - _NOT_DRAWN
    for name in names:
        if name in _LAYERS:
            changes[name] = rng.randint(1, 3)
        elif name in _WIDTHS:
            changes[name] = heads * dim
        elif name in _HEADS:
            changes[name] = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
        elif name in _INNER:
            changes[name] = rng.choice((17, 24, 40)) if family != "modernbert" else rng.choice((18, 40))
        elif name in _ACTIVATIONS and rng.random() < 0.5:
            changes[name] = rng.choice(("gelu", "relu", "gelu_new", "silu", "tanh", "quick_gelu"))
        elif name == "max_position_embeddings":
            changes[name] = LONGEST
        elif name in _VALUES and rng.random() < 0.5:
            changes[name] = rng.choice(_VALUES[name])
        elif name in switches and rng.random() < 0.4:
            changes[name] = rng.random() < 0.5
    if "layer_types" in names:
        kinds = ("full_attention", "sliding_attention")
        changes["layer_types"] = [rng.choice(kinds) for _ in range(changes["num_hidden_layers"])]
    return row.sizes | changes


def _own(config_class: Any) -> dict[str, Any]:
    """The entries that a class of configs adds to those of every config."""
    from transformers import PreTrainedConfig

    every = vars(PreTrainedConfig())
    return {name: value for name, value in vars(config_class()).items() if name not in every}


def _decoder(rng: random.Random, family: str, text: DrawText) -> dict[str, Any]:
    changes = text(rng, family) | {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    changes.pop("tie_word_embeddings", None)
    return changes


def _tower(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 3))
    return {
        "hidden_size": heads * rng.choice((4, 8, 12)),
        "num_attention_heads": heads,
        "intermediate_size": rng.choice((17, 40)),
        "num_hidden_layers": rng.randint(1, 3),
        "num_channels": rng.choice((1, 3)),
    }


def _of_images(rng: random.Random, family: str, text: DrawText) -> dict[str, Any]:
    side = rng.choice((1, 2, 3))
    vision = _tower(rng) | {"patch_size": 4, "image_size": 4 * side}
    changes: dict[str, Any] = {"image_token_index": IMAGE, "tie_word_embeddings": rng.random() < 0.5}
    if family == "gemma3":
        vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        decoder = _decoder(rng, "gemma3_text", text) | {"model_type": "gemma3_text"}
        return changes | {"vision_config": vision, "text_config": decoder, "mm_tokens_per_image": side**2}
    if family == "gemma4":
        return _of_gemma4(rng, text)
    if family == "llama4":
        ratio, width = rng.choice((0.5, 1.0)), rng.choice((8, 20))
        vision |= {"image_size": 4 * side * int(1 / ratio), "pixel_shuffle_ratio": ratio, "vision_output_dim": width}
        vision |= {"intermediate_size": int(vision["hidden_size"] / ratio**2)}
        vision |= {"projector_input_dim": width, "projector_output_dim": width}
        decoder = _decoder(rng, "llama4_text", text) | {"model_type": "llama4_text"}
        return changes | {"vision_config": vision, "text_config": decoder}
    if family == "mistral3":
        vision |= {"model_type": "pixtral"}
        decoder = _decoder(rng, "mistral", text) | {"model_type": "mistral"}
        return changes | {"vision_config": vision, "text_config": decoder, "spatial_merge_size": 1}
    kind = rng.choice(("clip_vision_model", "siglip_vision_model"))
    vision |= {"model_type": kind} | ({"vision_use_head": False} if kind.startswith("siglip") else {})
    name = rng.choice(("llama", "qwen3", "mistral", "gemma2"))
    changes |= {"vision_config": vision, "text_config": _decoder(rng, name, text) | {"model_type": name}}
    layers = range(-1 - vision["num_hidden_layers"], vision["num_hidden_layers"] + 1)
    chosen: Any = rng.choice(layers) if rng.random() < 0.6 else [rng.choice(layers) for _ in range(rng.randint(1, 3))]
    changes["vision_feature_layer"] = chosen
    # the class token of SigLIP, which has none, would be a patch
    changes["vision_feature_select_strategy"] = "full" if kind.startswith("siglip") else rng.choice(("full", "default"))
    changes["projector_hidden_act"] = rng.choice(("gelu", "relu"))
    changes["multimodal_projector_bias"] = rng.random() < 0.5
    return changes


_DECODERS_OF_GRIDS = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_5": "qwen3_5_text"}
_DECODERS_OF_GRIDS |= {"qwen3_5_moe": "qwen3_5_moe_text"}


def _of_gemma4(rng: random.Random, text: DrawText) -> dict[str, Any]:
    vision = _tower(rng) | {"head_dim": rng.choice((4, 8, 12)), "patch_size": 2, "position_embedding_size": 20}
    heads = vision["num_attention_heads"]
    vision["num_key_value_heads"] = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    vision |= {name: rng.random() < 0.5 for name in ("use_clipped_linears", "standardize")}
    vision["pooling_kernel_size"] = rng.choice((2, 3))
    decoder = _decoder(rng, "gemma4_text", text) | {"model_type": "gemma4_text"}
    types, shared = decoder["layer_types"], decoder["num_kv_shared_layers"]
    if set(types[: len(types) - shared]) != set(types):  # which the decoder alone is drawn with
        decoder["num_kv_shared_layers"] = 0
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": rng.random() < 0.5}
    return tokens | {"vision_config": vision, "text_config": decoder, "audio_token_id": VOCABULARY + 1}


def _of_grids(rng: random.Random, family: str, text: DrawText) -> dict[str, Any]:
    decoder = _decoder(rng, _DECODERS_OF_GRIDS.get(family, "qwen2"), text)
    for name in ("model_type", "use_sliding_window", "sliding_window", "max_window_layers"):
        decoder.pop(name, None)
    decoder.pop("layer_types", None)
    if family in (
        "qwen3_5",
        "qwen3_5_moe",
    ):  # with one of full attention: transformers' cache of states alone has no length
        kinds = ("linear_attention", "full_attention")
        types = ["full_attention", *(rng.choice(kinds) for _ in range(decoder["num_hidden_layers"] - 1))]
        decoder["layer_types"] = rng.sample(types, len(types))
    dim = decoder.get("head_dim") or decoder["hidden_size"] // decoder["num_attention_heads"]
    rope = decoder.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    pairs = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    first = rng.randint(0, pairs)
    second = rng.randint(0, pairs - first)
    decoder["rope_parameters"] = rope | {"mrope_section": [first, second, pairs - first - second]}
    heads, depth = rng.choice((1, 2, 3)), rng.randint(1, 3)
    width = heads * rng.choice((4, 8, 12))
    vision: dict[str, Any] = {"depth": depth, "num_heads": heads, "in_channels": rng.choice((1, 3)), "patch_size": 2}
    vision |= {"temporal_patch_size": rng.choice((1, 2)), "spatial_merge_size": rng.choice((1, 2))}
    some = [index for index in range(depth) if rng.random() < 0.5]
    if family == "qwen2_vl":
        vision |= {"embed_dim": width, "hidden_size": decoder["hidden_size"], "mlp_ratio": rng.choice((1, 2))}
    else:
        vision |= {"hidden_size": width, "intermediate_size": 24, "out_hidden_size": decoder["hidden_size"]}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 2 * vision["spatial_merge_size"] * rng.choice((1, 2, 3))}
        vision |= {"fullatt_block_indexes": some, "tokens_per_second": rng.choice((1, 2, 4))}
    if family in FRAMES_APART:
        vision |= {"num_position_embeddings": rng.choice((4, 9, 25))}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        some = some[: decoder["num_hidden_layers"]]
        vision |= {"deepstack_visual_indexes": some}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": rng.random() < 0.5}
    return tokens | {"vision_config": vision, "text_config": decoder}


def draw_inputs(rng: random.Random, family: str, head: str, config: Any) -> dict[str, Any]:
    """A batch of 1 to 3 rows, and the labels of `head`."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if family in IMAGE_TEXT:
        return _images(rng, family, head, config, generator)
    batch, length = rng.randint(1, 3), rng.choice((2, 5, 9, 14, 21))
    ids = torch.randint(3, VOCABULARY - 2, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, length - rng.randint(0, length // 2) :] = 0
    ids[:, -1] = config.eos_token_id if family in SEQ2SEQ else ids[:, -1]
    if "SequenceClassification" in head and family in SEQ2SEQ:  # which reads the last of the end tokens
        mask[:] = 1
    inputs: dict[str, Any] = {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id or 0)}
    if rng.random() < 0.8:
        inputs["attention_mask"] = mask
    if head.endswith("QuestionAnswering"):
        for name in ("start_positions", "end_positions"):
            inputs[name] = torch.randint(0, length, (batch,), generator=generator)
    elif head.endswith("SequenceClassification"):
        inputs["labels"] = torch.randint(0, 2, (batch,), generator=generator)
    elif head.endswith("TokenClassification"):
        inputs["labels"] = torch.randint(0, 2, (batch, length), generator=generator).masked_fill(mask == 0, -100)
    elif head == LANGUAGE[family]:
        said = torch.randint(3, VOCABULARY - 2, (batch, rng.choice((1, 4, 9))), generator=generator)
        inputs["labels"] = said if family in SEQ2SEQ else ids.masked_fill(mask == 0, -100)
    elif family in SEQ2SEQ and "Encoder" not in head:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY - 2, (batch, 4), generator=generator)
    return inputs


def _images(rng: random.Random, family: str, head: str, config: Any, generator: torch.Generator) -> dict[str, Any]:
    kinds = ("image", "video") if family in (*OF_GRIDS, "gemma4") else ("image",)
    grids: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    rows = []
    for _ in range(rng.randint(1, 3)):
        row = [rng.randint(3, 57)]
        for _ in range(rng.randint(0, 2)):
            kind = rng.choice(kinds)
            tokens, grid = _seen(rng, family, config, kind)
            row += [*tokens, *(rng.randint(3, 57) for _ in range(rng.randint(1, 3)))]
            grids[kind].append(grid)
        rows.append(row)
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    vision = config.vision_config
    for kind, found in grids.items():
        if not found:
            continue
        if family == "gemma4":
            inputs |= _patches(kind, found, config, generator)
            continue
        if family not in OF_GRIDS:
            shape = (len(found), vision.num_channels, vision.image_size, vision.image_size)
            inputs["pixel_values"] = torch.randn(shape, generator=generator)
            if family == "mistral3":
                inputs["image_sizes"] = torch.tensor([shape[2:]] * len(found))
            continue
        grid = torch.tensor(found)
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        inputs[name] = torch.randn(int(grid.prod(-1).sum()), size, generator=generator)
        inputs[f"{kind}_grid_thw"] = grid
    if family in (*OF_GRIDS, "gemma4"):
        inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    elif family == "gemma3" and rng.random() < 0.8:
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if "SequenceClassification" in head:
        inputs["labels"] = torch.randint(0, 2, (len(rows),), generator=generator)
    elif head == LANGUAGE[family]:
        inputs["labels"] = ids.masked_fill((ids == 0) | (ids >= VIDEO), -100)
        inputs["labels"][:, 1:][ids[:, :-1] == 0] = -100  # what padding predicts
    return inputs


def _patches(kind: str, found: list[list[int]], config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Gemma 4's frames, padded to one number of patches. found: the frames, rows and columns of each image or video."""
    frames = [grid[1:] for grid in found for _ in range(grid[0])]
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1) for rows, columns in frames]
    longest = max(len(one) for one in places) + config.vision_config.pooling_kernel_size**2
    padded = [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one)), value=-1) for one in places]
    size = 3 * config.vision_config.patch_size**2
    name = "pixel_values" if kind == "image" else "pixel_values_videos"
    inputs = {name: torch.rand(len(frames), longest, size, generator=generator)}
    inputs[f"{kind}_position_ids"] = torch.stack(padded)
    return inputs if kind == "image" else inputs | {"num_frames_per_video": torch.tensor([grid[0] for grid in found])}


def _seen(rng: random.Random, family: str, config: Any, kind: str) -> tuple[list[int], list[int]]:
    """The tokens of an image or video, and its grid."""
    if family == "gemma3":
        return [IMAGE] * config.mm_tokens_per_image, []
    if family not in (*OF_GRIDS, "gemma4"):
        vision = config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2
        count = int(count * getattr(vision, "pixel_shuffle_ratio", 1.0) ** 2)
        whole = vision.model_type == "clip_vision_model" and config.vision_feature_select_strategy == "full"
        return [IMAGE] * (count + whole), []
    sizes = config.vision_config
    merge = sizes.pooling_kernel_size if family == "gemma4" else sizes.spatial_merge_size
    frames = rng.randint(1, 2) if kind == "video" else 1
    rows, columns = rng.randint(1, 4), rng.randint(1, 4)
    token = VIDEO if kind == "video" else IMAGE
    between = [rng.randint(3, 57)] if family in FRAMES_APART else []  # which tells the time of each frame
    tokens = ([token] * (rows * columns) + between) * frames
    return tokens, [frames, rows * merge, columns * merge]
