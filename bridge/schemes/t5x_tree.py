"""T5X's names of the T5 family: T5, mT5, UMT5, LongT5 and Switch Transformers.

Sources: t5x `examples/t5/network.py` and `examples/scalable_t5/network.py`, flaxformer for LongT5 and Switch; which
torch tensor a leaf is, transformers' `convert_t5x_checkpoint_to_flax.py`, `convert_t5x_checkpoint_to_pytorch.py`,
`convert_longt5x_checkpoint_to_flax.py`, `convert_umt5_checkpoint_to_pytorch.py` and
`convert_switch_transformers_original_flax_checkpoint_to_pytorch.py`.

Kernels are (in, out), those of attention also (in, heads, dim) and (heads, dim, out); relative positions are
(heads, buckets). A scanned model keeps its layers along axis 1 of every leaf; both are read. UMT5 is written
scanned, with a head axis, as it was published, the others with a subtree per layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.head_transforms import heads_in, heads_out, stacked
from easytorch.bridge.rules.table import TIED, TIED_IN_TORCH, Rule, Rules
from easytorch.bridge.rules.transforms import Transform
from easytorch.bridge.schemes.t5x_config import t5x_config

_FAMILIES = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
_MARK = "encoder/encoder_norm/scale"
_WRAPPERS = ("optimizer/target/", "target/", "params/", "")
_EMBEDDING, _HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_ATTENTIONS = {"encoder0": "attention", "decoder0": "self_attention", "decoder1": "encoder_decoder_attention"}
_NORMS = {
    "encoder0": "pre_attention_layer_norm",
    "encoder1": "pre_mlp_layer_norm",
    "decoder0": "pre_self_attention_layer_norm",
    "decoder1": "pre_cross_attention_layer_norm",
    "decoder2": "pre_mlp_layer_norm",
}
_IN_BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d)\.(.+)\.weight")
_PARTS = {
    "norm": re.compile(r"layer_norm"),
    "projection": re.compile(r"\w*Attention\.([qkvo])"),
    "positions": re.compile(r"\w*Attention\.relative_attention_bias"),
    "side positions": re.compile(r"\w*Attention\.global_relative_attention_bias"),
    "side norm": re.compile(r"\w*Attention\.global_input_layer_norm"),
    "mlp": re.compile(r"(?:DenseReluDense|mlp)\.(wi|wi_0|wi_1|wo)"),
    "expert": re.compile(r"mlp\.experts\.expert_(\d+)\.(wi|wi_0|wi_1|wo)"),
    "router": re.compile(r"mlp\.router\.classifier"),
}


@dataclass(frozen=True)
class _Leaf:
    """The path of a torch tensor in its layer, and its layout there."""

    path: str
    change: str = "identity"
    expert: int | None = None
    # Belongs to the whole stack, not to each of its layers.
    shared: bool = False


class T5xTree:
    """The scheme of T5X's encoder-decoder models."""

    name = "t5x"
    by_outline = False

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """By the norm at the end of the encoder."""
        return any(name.endswith(_MARK) for name in tensors)

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """One row per leaf; `CheckpointError` for a family T5X has no names for."""
        if config.model_type not in _FAMILIES:
            raise CheckpointError(
                f"T5X has no names for {config.model_type!r}; it has for {', '.join(_FAMILIES)}", file=config.file
            )
        return tuple(_rows(config.model_type, architecture, tensors))

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """All sizes are shapes; what is not (the activation of a gated MLP, a local LongT5) needs the config."""
        return t5x_config({name.removeprefix(_wrapper(tensors)): info for name, info in tensors.items()})


def _wrapper(tensors: Mapping[str, TensorInfo]) -> str:
    return next((prefix for prefix in _WRAPPERS if prefix + _MARK in tensors), "")


def _rows(family: str, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Iterator[Rule]:
    config = architecture.names.model.config
    wrapper = "target/" if tensors is None else _wrapper(tensors)
    stack = _Stack(family, config.num_heads, wrapper, tensors)
    # transformers 5 ties the head of every T5 by its config, and unties it where a checkpoint has another one; T5 1.0,
    # which scales its output, is the one that shares the embedding in T5X.
    scaled = getattr(config, "scale_decoder_outputs", family == "switch_transformers" and config.tie_word_embeddings)
    has_head = not scaled if tensors is None else wrapper + _HEAD in tensors
    for name in architecture.names.tensors:
        if name.endswith("embed_tokens.weight") or (name == "lm_head.weight" and not has_head):
            yield name, wrapper + _EMBEDDING, TIED
        elif name == "lm_head.weight":
            yield name, wrapper + _HEAD, "linear"
            yield name, wrapper + _EMBEDDING, TIED_IN_TORCH
        elif (found := _IN_BLOCK.fullmatch(name)) is not None:
            stack.add(name, found[1], int(found[2]), _in_block(found[1] + found[3], found[4], family))
        else:
            path, change = _outside(name)
            yield name, wrapper + path, change
    yield from stack.rows()


def _outside(name: str) -> tuple[str, str]:
    side = name.partition(".")[0]
    paths = {
        "shared.weight": (_EMBEDDING, "identity"),
        f"{side}.final_layer_norm.weight": (f"{side}/{side}_norm/scale", "identity"),
    }
    if name not in paths:
        raise CheckpointError("T5X has no name for it", tensor=name)
    return paths[name]


def _in_block(place: str, inside: str, family: str) -> _Leaf:
    """The leaf of a tensor called `inside` in layer `place` of a block."""
    matches = ((kind, pattern.fullmatch(inside)) for kind, pattern in _PARTS.items())
    kind, found = next(((kind, match) for kind, match in matches if match is not None), ("", None))
    if found is None:
        raise CheckpointError("T5X has no name for it", tensor=inside)
    match kind:
        case "norm":
            return _Leaf(f"{_NORMS[place]}/scale")
        case "projection":
            return _Leaf(f"{_ATTENTIONS[place]}/{_PROJECTIONS[found[1]]}/kernel", "linear")
        case "positions":
            return _Leaf("relpos_bias/rel_embedding", "linear", shared=family != "umt5")
        case "side positions":
            return _Leaf("side_relpos_bias/rel_embedding", "linear", shared=True)
        case "side norm":
            return _Leaf("attention/T5LayerNorm_0/scale")
        case "expert":
            return _Leaf(f"mlp/expert/{found[2]}/kernel", "linear", expert=int(found[1]))
        case "router":
            return _Leaf("mlp/router/router_weights/w/kernel", "linear")
    return _Leaf(f"mlp/{found[1]}/kernel", "linear")


class _Stack:
    """The tensors of all blocks, gathered into leaves."""

    def __init__(self, family: str, heads: int, wrapper: str, tensors: Mapping[str, TensorInfo] | None) -> None:
        self._heads = heads
        self._wrapper = wrapper
        self._tensors = tensors
        self._scanned = {
            side: family == "umt5" if tensors is None else f"{wrapper}{side}/{side}/pre_mlp_layer_norm/scale" in tensors
            for side in ("encoder", "decoder")
        }
        # Leaf -> its torch tensors by layer and expert, and the layout of one.
        self._leaves: dict[str, tuple[str, dict[tuple[int, int], str]]] = {}

    def add(self, name: str, side: str, layer: int, leaf: _Leaf) -> None:
        """Places the torch tensor `name`."""
        scanned = self._scanned[side] and not leaf.shared
        module = "" if leaf.shared else f"{side}/" if scanned else f"layers_{layer}/"
        path = f"{self._wrapper}{side}/{module}{leaf.path}"
        _, names = self._leaves.setdefault(path, (leaf.change, {}))
        names[layer if scanned else 0, leaf.expert or 0] = name
        if scanned and leaf.expert is not None:
            raise CheckpointError("T5X's scanned models have no experts", tensor=name)

    def rows(self) -> Iterator[Rule]:
        for path, (change, names) in self._leaves.items():
            ordered = tuple(names[place] for place in sorted(names))
            scanned = self._is_scanned(path)
            layer = self._layout(path, change, scanned)
            if scanned:
                yield ordered, path, stacked(layer, len(ordered), 1)
            elif "/expert/" in path:
                yield ordered, path, stacked(layer, len(ordered), 0)
            else:
                yield ordered[0], path, layer

    def _is_scanned(self, path: str) -> bool:
        return any(path.startswith(f"{self._wrapper}{side}/{side}/") for side, on in self._scanned.items() if on)

    def _layout(self, path: str, change: str, scanned: bool) -> str | Transform:
        """`change`, or with an axis for the heads where what is read has one, or UMT5 is written."""
        *_, module, projection, _ = path.split("/")
        if not module.endswith("attention") or projection not in _PROJECTIONS.values():
            return change
        info = None if self._tensors is None else self._tensors.get(path)
        apart = scanned if info is None else len(info.shape) - scanned == 3
        if not apart:
            return change
        return heads_in(self._heads) if projection == "out" else heads_out(self._heads)
