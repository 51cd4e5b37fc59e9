"""ViT and SigLIP as google-research's vision_transformer and big_vision name them, mostly in npz files.

Sources: vision_transformer's `vit_jax/models_vit.py`, big_vision's `models/vit.py`, `models/proj/image_text/` and
`utils.py`; which torch tensor a leaf is, transformers' `convert_vit_timm_to_pytorch.py` and `convert_siglip_to_hf.py`.
Attention kernels are those of `flax.linen.MultiHeadDotProductAttention`: (D, H, d) in and (H, d, D) out.

Blocks have been numbered in two ways (one counter for all modules before flax.linen, then one per class), the position
table has been in three places, and a scanned encoder keeps its layers on a leading axis: all of these are read. ViTs
are written as vision_transformer publishes them, SigLIP as big_vision does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, joined, stacked, with_batch
from easytorch.bridge.rules.table import BUFFER, Rule, Rules
from easytorch.bridge.rules.transforms import Transform
from easytorch.bridge.schemes.big_vision_config import siglip_config, vit_config

_QUERY = "/query/kernel"
_ATTENTION = "MultiHeadDotProductAttention"
_POSITIONS = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding")
# What wraps the parameters: big_vision's checkpoints with optax, and those with flax's own optimizer.
_WRAPPERS = ("params/", "opt/target/", "")
_VIT, _SIGLIP = ("vit",), ("siglip", "siglip_vision_model", "siglip_text_model")

# The parts of a block by torch name, (torch, leaf, kind of layer), for each of the two families.
_VIT_BLOCK = (
    ("layernorm_before", "norm1", "norm"),
    ("attention.attention.query", "attention/query", "heads_out"),
    ("attention.attention.key", "attention/key", "heads_out"),
    ("attention.attention.value", "attention/value", "heads_out"),
    ("attention.output.dense", "attention/out", "heads_in"),
    ("layernorm_after", "norm2", "norm"),
    ("intermediate.dense", "mlp/Dense_0", "linear"),
    ("output.dense", "mlp/Dense_1", "linear"),
)
_SIGLIP_BLOCK = (
    ("layer_norm1", "norm1", "norm"),
    ("self_attn.q_proj", "attention/query", "heads_out"),
    ("self_attn.k_proj", "attention/key", "heads_out"),
    ("self_attn.v_proj", "attention/value", "heads_out"),
    ("self_attn.out_proj", "attention/out", "heads_in"),
    ("layer_norm2", "norm2", "norm"),
    ("mlp.fc1", "mlp/Dense_0", "linear"),
    ("mlp.fc2", "mlp/Dense_1", "linear"),
)


@dataclass(frozen=True)
class _Names:
    """The names of a block's modules, and whether the layers are stacked on an axis of the leaves."""

    attention: str
    norm1: str
    norm2: str
    mlp: str
    scanned: bool = False

    def of(self, part: str) -> str:
        """`attention/query` by these names."""
        module, _, rest = part.partition("/")
        name: str = getattr(self, module)
        return f"{name}/{rest}" if rest else name


_LINEN = _Names(f"{_ATTENTION}_0", "LayerNorm_0", "LayerNorm_1", "MlpBlock_0")
_BEFORE_LINEN = _Names(f"{_ATTENTION}_1", "LayerNorm_0", "LayerNorm_2", "MlpBlock_3")


class BigVisionTree:
    """The scheme of Google's ViT and SigLIP checkpoints."""

    name = "big_vision"
    by_outline = False

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """By an attention of flax.linen inside an `encoderblock`."""
        return any(
            name.endswith(_QUERY) and f"/{_ATTENTION}_" in name and "/encoderblock" in f"/{name}" for name in tensors
        )

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """One row per tensor; `CheckpointError` for a family that is neither ViT nor SigLIP."""
        if config.model_type in _VIT:
            return tuple(_vit(architecture, tensors))
        if config.model_type in _SIGLIP:
            return tuple(_siglip(architecture, tensors))
        raise CheckpointError(
            f"big_vision has no names for {config.model_type!r}; it has for {', '.join(_VIT + _SIGLIP)}",
            file=config.file,
        )

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """Everything: widths, heads, layers, patches and classes are shapes; activation and epsilon are flax's."""
        tree = _unwrapped(tensors)
        if any(name.startswith("txt/") for name in tree):
            return siglip_config(tree)
        return vit_config(tree)


def _unwrapped(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    prefix = _wrapper(tensors)
    return {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}


def _wrapper(tensors: Mapping[str, TensorInfo]) -> str:
    return next(prefix for prefix in _WRAPPERS if any(name.startswith(prefix) for name in tensors))


def _names(tensors: Mapping[str, TensorInfo] | None, tower: str, written: _Names) -> _Names:
    """The names in the blocks of the encoder at `tower`, those of `written` where nothing is read."""
    if tensors is None:
        return written
    paths = [name.removeprefix(tower) for name in tensors if name.startswith(tower) and name.endswith(_QUERY)]
    scanned = any(path.startswith("encoderblock/") for path in paths)
    names = _BEFORE_LINEN if any(f"/{_ATTENTION}_1/" in path for path in paths) else _LINEN
    return _Names(names.attention, names.norm1, names.norm2, names.mlp, scanned)


def _layer(torch: str, leaf: str, kind: str, heads: int) -> Iterator[tuple[str, str, str | Transform]]:
    """Weight and bias of one layer."""
    weights: dict[str, tuple[str, str | Transform]] = {
        "norm": ("scale", "identity"),
        "linear": ("kernel", "linear"),
        "conv2d": ("kernel", "conv2d"),
        "heads_out": ("kernel", heads_out(heads)),
        "heads_in": ("kernel", heads_in(heads)),
    }
    name, change = weights[kind]
    yield f"{torch}.weight", f"{leaf}/{name}", change
    yield f"{torch}.bias", f"{leaf}/bias", heads_bias(heads) if kind == "heads_out" else "identity"


def _blocks(
    torch: str, leaf: str, parts: tuple[tuple[str, str, str], ...], names: _Names, layers: int, heads: int
) -> Iterator[Rule]:
    """The layers of an encoder: a row per tensor, or one row for all layers of a scanned one."""
    for inside, module, kind in parts:
        for end, path, change in _layer(inside, names.of(module), kind, heads):
            torch_names = tuple(f"{torch}{number}.{end}" for number in range(layers))
            if names.scanned:
                yield torch_names, f"{leaf}encoderblock/{path}", stacked(change, layers, 0)
            else:
                yield from (
                    (name, f"{leaf}encoderblock_{number}/{path}", change) for number, name in enumerate(torch_names)
                )


def _vit(architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Iterator[Rule]:
    settings = architecture.names.model.config
    patches = "embeddings.patch_embeddings.projection.weight"
    prefix = next(name.removesuffix(patches) for name in architecture.shapes if name.endswith(patches))
    wrapper = "" if tensors is None else _wrapper(tensors)
    heads, layers = settings.num_attention_heads, settings.num_hidden_layers
    names = _names(tensors, f"{wrapper}Transformer/", _BEFORE_LINEN)
    yield f"{prefix}embeddings.cls_token", f"{wrapper}cls", "identity"
    yield f"{prefix}embeddings.position_embeddings", *_vit_positions(wrapper, tensors)
    yield f"{prefix}embeddings.mask_token", None, BUFFER
    yield from _layer(f"{prefix}embeddings.patch_embeddings.projection", f"{wrapper}embedding", "conv2d", heads)
    yield from _blocks(f"{prefix}encoder.layer.", f"{wrapper}Transformer/", _VIT_BLOCK, names, layers, heads)
    yield from _layer(f"{prefix}layernorm", f"{wrapper}Transformer/encoder_norm", "norm", heads)
    yield from _layer(f"{prefix}pooler.dense", f"{wrapper}pre_logits", "linear", heads)
    yield from _layer("classifier", f"{wrapper}head", "linear", heads)


def _vit_positions(wrapper: str, tensors: Mapping[str, TensorInfo] | None) -> tuple[str, str | Transform]:
    """The path of the position table, and its layout, with or without a position for the class token."""
    for path in _POSITIONS:
        if tensors is not None and (info := tensors.get(wrapper + path)) is not None:
            whole = len(info.shape) != 3 or math.isqrt(info.shape[1]) ** 2 != info.shape[1]
            return wrapper + path, "identity" if whole else without_class_position
    return wrapper + _POSITIONS[0], "identity"


def _without_class_position(positions: np.ndarray) -> np.ndarray:
    if np.any(positions[:, :1] != 0):
        raise CheckpointError("its class token has a position, and this layout has no place for one")
    return positions[:, 1:]


# torch (1, 1 + N, D) with a first row of zeros <-> (1, N, D): big_vision adds positions before the class token.
without_class_position = Transform(
    name="without_class_position",
    to_flax=lambda arrays: _without_class_position(arrays[0]),
    to_torch=lambda array: (np.concatenate([np.zeros_like(array[:, :1]), array], axis=1),),
    flax_shape=lambda shapes: (shapes[0][0], shapes[0][1] - 1, shapes[0][2]),
    torch_shapes=lambda shape: ((shape[0], shape[1] + 1, shape[2]),),
    rank=3,
)


def _siglip(architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Iterator[Rule]:
    settings = architecture.names.model.config
    towers = {kind: getattr(settings, f"{kind}_config", None) for kind in ("vision", "text")}
    both = all(towers.values())
    wrapper = "params/" if tensors is None else _wrapper(tensors)
    if both:
        yield "logit_scale", f"{wrapper}t", "identity"
        yield "logit_bias", f"{wrapper}b", "identity"
    # The settings of a model that is one tower are its own.
    vision = towers["vision"] or (settings if hasattr(settings, "patch_size") else None)
    text = towers["text"] or (settings if hasattr(settings, "vocab_size") else None)
    if vision is not None:
        yield from _siglip_vision(vision, wrapper + _tower("img/", wrapper, tensors, both), tensors)
    if text is not None:
        yield from _siglip_text(text, wrapper + _tower("txt/", wrapper, tensors, both), tensors)


def _tower(name: str, wrapper: str, tensors: Mapping[str, TensorInfo] | None, both: bool) -> str:
    """The folder of a tower: a checkpoint of one tower alone needs none."""
    there = both if tensors is None else any(path.startswith(wrapper + name) for path in tensors)
    return name if there else ""


def _siglip_vision(settings: Any, leaf: str, tensors: Mapping[str, TensorInfo] | None) -> Iterator[Rule]:
    torch, heads = "vision_model.", settings.num_attention_heads
    encoder = f"{leaf}Transformer/"
    names = _names(tensors, encoder, _LINEN)
    yield from _layer(f"{torch}embeddings.patch_embedding", f"{leaf}embedding", "conv2d", heads)
    yield f"{torch}embeddings.position_embedding.weight", f"{leaf}pos_embedding", with_batch
    yield from _blocks(f"{torch}encoder.layers.", encoder, _SIGLIP_BLOCK, names, settings.num_hidden_layers, heads)
    yield from _layer(f"{torch}post_layernorm", f"{encoder}encoder_norm", "norm", heads)
    head, pool = f"{torch}head.", f"{leaf}MAPHead_0/"
    attention = f"{pool}{_ATTENTION}_0/"
    yield f"{head}probe", f"{pool}probe", "identity"
    for end, kind, change in (("weight", "kernel", heads_out(heads)), ("bias", "bias", heads_bias(heads))):
        leaves = tuple(f"{attention}{name}/{kind}" for name in ("query", "key", "value"))
        yield f"{head}attention.in_proj_{end}", leaves, joined(change, 3)
    yield from _layer(f"{head}attention.out_proj", f"{attention}out", "heads_in", heads)
    yield from _layer(f"{head}layernorm", f"{pool}LayerNorm_0", "norm", heads)
    yield from _layer(f"{head}mlp.fc1", f"{pool}MlpBlock_0/Dense_0", "linear", heads)
    yield from _layer(f"{head}mlp.fc2", f"{pool}MlpBlock_0/Dense_1", "linear", heads)


def _siglip_text(settings: Any, leaf: str, tensors: Mapping[str, TensorInfo] | None) -> Iterator[Rule]:
    torch, heads = "text_model.", settings.num_attention_heads
    encoder = f"{leaf}Encoder_0/"
    names = _names(tensors, encoder, _LINEN)
    yield f"{torch}embeddings.token_embedding.weight", f"{leaf}Embed_0/embedding", "identity"
    yield f"{torch}embeddings.position_embedding.weight", f"{leaf}pos_embedding", with_batch
    yield from _blocks(f"{torch}encoder.layers.", encoder, _SIGLIP_BLOCK, names, settings.num_hidden_layers, heads)
    yield from _layer(f"{torch}final_layer_norm", f"{encoder}encoder_norm", "norm", heads)
    yield from _layer(f"{torch}head", f"{leaf}head", "linear", heads)
