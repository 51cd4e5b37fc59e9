"""A shrunken config: the same architecture at a size that builds and runs in milliseconds.

Every width of a config and of the configs inside it is divided by one number, and every head count by another, so that
sizes that must agree (hidden size = heads * head size, a projector's input = a tower's output) still do. One layer of
each type is kept, windows become shorter than the trial's rows, and token ids move into the small vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

VOCABULARY = 320
POSITIONS = 128
WINDOW = 4
EXPERTS, EXPERTS_A_TOKEN = 4, 2
FRAMES, LATENTS = 4, 2
LEAST_WIDTH = 8  # the 3 channels of an image are fewer
LEAST_HEAD = 4  # smaller ones stay: half of a rotary head must not be 0

# (largest divisor of head counts, divisor of head sizes, fewer layers, smaller images): the first that builds and runs
# is taken.
ATTEMPTS = (
    (8, 8, True, True),
    (1, 8, True, True),
    (1, 4, True, True),
    (32, 1, True, True),
    (1, 4, True, False),
    (32, 1, True, False),
    (8, 8, False, False),
    (8, 8, False, True),
    (1, 4, False, True),
    (1, 1, True, True),
)

_LAYERS = re.compile(
    r"(num_|n_)?(hidden_|encoder_|decoder_|text_|vision_)?(hidden_)?(layers?|blocks)|(num_)?(en|de)coder_layers|depth|"
    r"(en|de)coder_num_hidden_layers|num_(en|de)coder_(layers|blocks)|num_block_layers|(en|de)coder_depth"
)
_HEADS = re.compile(
    r"(.*_)?(num|n)_(attention_|key_value_|query_|kv_|key_|value_|mamba_|linear_)?heads?(_kv|_kv_heads)?|"
    r"(.*_)?(num_)?(attention|key_value|kv)_heads|heads|n_head_kv|num_(attention|query)_groups|multi_query_group_num|"
    r"num_(attention_)?heads_per_stage"
)
_KEY_HEADS = re.compile(r".*(key_value|kv).*")
_HEAD_SIZES = re.compile(
    r"(.*_)?head_(dim|size)|d_kv|kv_channels|rotary_dim|dim_head|(.*_)?head_dim_.*|(.*_)?d_head|(.*_)?headdim"
)
_WIDTHS = re.compile(
    r"d_model|d_ff|d_inner|n_embd|n_inner|(.*_)?(hidden|intermediate|embedding|embed|ffn|inner|mlp|projection|ff)_"
    r"(size|dim|sizes|dims|channels)|(.*_)?(en|de)coder_ffn_dim|(.*_)?hidden_sizes?|(.*_)?embed_dims?|"
    r"(.*_)?lora_rank|dim|dim_feedforward|feedforward_dim|ffn_hidden_size|(.*_)?ffn_dim|width|output_dim|proj_dim|"
    r"word_embed_proj_dim|(.*_)?hidden_dim|conv_dim|(.*_)?intermediate_size(_mlp)?|vision_output_dim|lru_width|"
    r"out_hidden_size|embed_dim_per_stage|(.*_)?expert_ffn_size|moe_intermediate_size|neck_hidden_sizes|emb_dim|"
    r"output_channels|backbone_channel_list|(.*_)?attention_size|hidden_size_per_layer_input|fusion_hidden_size|query_dim|"
    r"num_pos_feats|mamba_d_ssm|(stage|stem|encoder|decoder)_(in_|mid_|out_)?channels|(.*_)?fusion_hidden_sizes|"
    r"(upsample|duration)_.*channels|.*_hidden_dimension|(.*_)?codebook_dim|num_filters|.*bottleneck_(size|dim)|(.*_)?d_latents|"
    r"coordinate_size|shape_size|pooler_output_size|hidden_size_global|share_expert_dim|descriptor_(decoder_)?dim"
)
_GROUPS = re.compile(r".*_groups")  # of a convolution of one channel each
_EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_experts_per_layer")
_FRAMES = re.compile(r"num_frames|frames_per_clip|num_clip_frames")
_HASHES = re.compile(r".*_hash_.*_vocab")
_EXPERTS_A_TOKEN = re.compile(
    r"num_experts_per_tok(en)?|moe_(k|topk|top_k)|top_k|num_selected_experts|moe_topk|num_experts_per_token"
)
_POSITIONS = re.compile(r"(max_(.*_)?position(_embedding)?s|n_positions|max_sequence_length|n_ctx|max_seq_len)")
_WINDOWS = re.compile(
    r"sliding_window(_size)?|local_attention|attention_chunk_size|attention_window(_size)?|local_window|block_size|global_tokens_size"
)
_IDS = re.compile(r".*_(token_)?(id|ids|index|idx)|suppress_tokens|begin_suppress_tokens")
_INDEX_LISTS = re.compile(
    r".*(indexes|indices)|.*_idxs?|vision_feature_layer|.*_select_layer|.*attention_blocks|.*_layers_idx|"
    r"cross_attention_layers|full_attn_idxs|attn_layer_indices|insert_layer_id|first_k_dense_replace"
)
_PERIODS = re.compile(
    r"(_?sliding_window|layer)_pattern|.*_interval|.*_sparse_step|.*_layer_period|cross_attention_freq.*"
)


def shrunken(config: PreTrainedConfig, attempt: int = 0) -> PreTrainedConfig:
    """A small copy of `config`, without a chosen attention; `attempt`: which of `ATTEMPTS`."""
    heads, by, layers, images = ATTEMPTS[attempt]
    config = copy.deepcopy(config)
    parts = list(configs_in(config))
    head_divisor = _common_divisor(parts, heads)
    sizes = [size for part in parts for size in _head_sizes(part)]
    while by > 1 and any(size < by * LEAST_HEAD for size in sizes):
        by //= 2
    ids: dict[int, int] = {}
    for part in parts:
        part._attn_implementation_internal = None
        part.dtype = None
        if layers:
            _keep_one_of_each_layer(part)
        hidden = vars(part).get("hidden_size")
        for name, value in list(vars(part).items()):
            named = "hidden_size" if _is_int(value) and value == hidden and _GROUPS.fullmatch(name) else name
            small = _shrunken_value(named, value, head_divisor, by, ids)
            if small is not value:
                setattr(part, name, small)
        _fill(part)
        _shrink_rotary(part, by)
        if images:
            _shrink_image(part)
    return config


def _fill(part: PreTrainedConfig) -> None:
    """Sets entries that the class needs and that its default config, unlike a checkpoint's, lacks or has wrong."""
    given = vars(part)  # attributes may be properties that raise
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if _is_int(heads) and _is_int(width):
        if "head_dim" not in given and width % heads:
            part.num_attention_heads = heads = math.gcd(width, heads)
        if given.get("head_dim", width) is None and width % heads == 0:
            part.head_dim = width // heads
        if given.get("num_key_value_heads", heads) is None:
            part.num_key_value_heads = heads
    if "kv_n_heads" in given and "clip_qkv" in given:  # DBRX's attention, whose checkpoints have both
        part.rope_theta = given.get("rope_theta", 10000.0)
        part.clip_qkv = given["clip_qkv"] or 8.0
    period, offset = given.get("attn_layer_period"), given.get("attn_layer_offset")
    if _is_int(period) and _is_int(offset):
        part.attn_layer_offset = min(offset, period - 1)


def configs_in(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """`config` and the configs inside it, each once."""
    seen: set[int] = set()
    waiting = [config]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]


def _head_sizes(part: PreTrainedConfig) -> Iterator[int]:
    """The head sizes of the attention of `part`; none where they are not known."""
    given = vars(part)  # attributes may be properties that raise
    if _is_int(given.get("head_dim")):
        yield given["head_dim"]
        return
    for width in ("hidden_size", "d_model", "embed_dim", "n_embd", "dim"):
        for heads in ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"):
            if _is_int(given.get(width)) and _is_int(given.get(heads)) and given[heads]:
                yield given[width] // given[heads]


def _common_divisor(parts: list[PreTrainedConfig], most: int) -> int:
    """The largest power of two up to `most` that divides every count of query heads."""
    counts = [
        value
        for part in parts
        for name, value in vars(part).items()
        if _HEADS.fullmatch(name) and _is_int(value) and value > 1 and (most <= 8 or not _KEY_HEADS.fullmatch(name))
    ]
    return math.gcd(most, *counts) if counts else 1


def _shrunken_value(name: str, value: Any, heads: int, by: int, ids: dict[int, int]) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, str):
        if _INDEX_LISTS.fullmatch(name):
            return value
        small = [_shrunken_value(name, item, heads, by, ids) for item in value]
        return value if all(a is b for a, b in zip(small, value, strict=True)) else type(value)(small)
    if not _is_int(value) or value <= 1:
        return value
    if "vocab_size" in name and "type" not in name:
        return min(value, VOCABULARY)
    if _IDS.fullmatch(name):
        return value if value < VOCABULARY else ids.setdefault(value, VOCABULARY - 1 - len(ids))
    for pattern, most in ((_POSITIONS, POSITIONS), (_WINDOWS, WINDOW), (_EXPERTS, EXPERTS), (_PERIODS, 2)):
        if pattern.fullmatch(name):
            return min(value, most)
    if _EXPERTS_A_TOKEN.fullmatch(name):
        return min(value, EXPERTS_A_TOKEN)
    if name in ("n_group", "num_group", "num_expert_group"):
        return min(value, 2)
    if _FRAMES.fullmatch(name):
        return min(value, FRAMES)
    if _HASHES.fullmatch(name):
        return min(value, VOCABULARY)
    if name == "latent_query_num":
        return LATENTS
    if name == "topk_group":
        return 1
    for pattern, divisor in ((_HEADS, heads), (_HEAD_SIZES, by)):
        if pattern.fullmatch(name):
            return max(1, value // divisor)
    if _WIDTHS.fullmatch(name) and value >= LEAST_WIDTH:
        width = max(1, value // (heads * by))
        return -(-width // 8) * 8 if "moe" in name else width  # grouped matmuls need rows aligned to 16 bytes
    return value


def _keep_one_of_each_layer(part: PreTrainedConfig) -> None:
    """Two layers, or one of each kind a list of kinds names; stage names follow."""
    counts = {name: value for name, value in vars(part).items() if _LAYERS.fullmatch(name) and _is_int(value)}
    for name in ("depths", "num_blocks", "layer_repeats"):
        if isinstance(getattr(part, name, None), list | tuple):
            setattr(part, name, type(getattr(part, name))(min(depth, 2) for depth in getattr(part, name)))
    for name, count in counts.items():
        if count <= 2:
            continue
        lists = {
            other: value
            for other, value in vars(part).items()
            if isinstance(value, list | tuple) and len(value) == count and not _INDEX_LISTS.fullmatch(other)
        }
        kinds = list(zip(*lists.values(), strict=True)) or [()] * count
        kept = sorted({repr(kind): index for index, kind in reversed(list(enumerate(kinds)))}.values())[:4]
        if len(kept) < 2:
            kept = [0, 1]
        for other, value in lists.items():
            setattr(part, other, type(value)(value[index] for index in kept))
        setattr(part, name, len(kept))
        _clip_indices(part, len(kept))
        stages = getattr(part, "stage_names", None)
        if isinstance(stages, list) and len(stages) == count + 1:
            part.stage_names = ["stem", *(f"stage{index + 1}" for index in range(len(kept)))]
            part._out_features, part._out_indices = [f"stage{len(kept)}"], [len(kept)]


def _clip_indices(part: PreTrainedConfig, layers: int) -> None:
    for name, value in list(vars(part).items()):
        if not _INDEX_LISTS.fullmatch(name) or (_IDS.fullmatch(name) and _is_int(value)):
            continue
        if isinstance(value, list | tuple) and value and all(map(_is_int, value)):
            setattr(part, name, type(value)(sorted({index if index < layers else layers - 1 for index in value})))
        elif _is_int(value):
            setattr(part, name, max(-layers, min(value, layers - 1)))


def _shrink_rotary(part: PreTrainedConfig, by: int) -> None:
    rope = getattr(part, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "rope_type" in one:
            _turn_pairs(part, one)
            one["mrope_section"] = _section(part, one, by)
        for name in ("short_factor", "long_factor"):
            if isinstance(one.get(name), list):
                one[name] = one[name][: max(1, len(one[name]) // by)]


def _turn_pairs(part: PreTrainedConfig, rope: dict[str, Any]) -> None:
    """A quarter of a small head may be an odd count, which is no config of a checkpoint: one more number turns."""
    head, factor = next(_head_sizes(part), 0), rope.get("partial_rotary_factor")
    if head and isinstance(factor, float) and int(head * factor) % 2:
        rope["partial_rotary_factor"] = (int(head * factor) + 1.5) / head  # half a number above it, against rounding


def _section(part: PreTrainedConfig, rope: dict[str, Any], by: int) -> list[int]:
    """The rotary pairs for time, height and width; some classes' default does not fit the small head."""
    if rope.get("mrope_section") and all(size % by == 0 for size in rope["mrope_section"]):
        return [size // by for size in rope["mrope_section"]]
    head = next(_head_sizes(part), 0)
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def _shrink_image(part: PreTrainedConfig) -> None:
    patch = getattr(part, "patch_size", None)
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    size = 4 * patch if _is_int(patch) and patch > 8 else 64
    for name in ("image_size", "img_size"):
        value = getattr(part, name, None)
        if _is_int(value) and value > size:
            setattr(part, name, size)
        elif isinstance(value, list | tuple) and all(map(_is_int, value)):
            setattr(part, name, type(value)(min(side, size) for side in value))
    if _is_int(getattr(part, "image_embedding_size", None)):
        part.image_embedding_size = 4
    mels = getattr(part, "max_source_positions", None)
    if _is_int(mels) and mels > 16:
        part.max_source_positions = 16


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
