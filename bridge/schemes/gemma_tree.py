"""Gemma 1 to 3 as DeepMind's `gemma` library keeps them, the vision tower of Gemma 3 included.

Source: google-deepmind/gemma, `gm/ckpts/_checkpoint.py` and `_compat.py` (the layouts), `gm/nn/_modules.py` (the
einsums), `gm/nn/vision/_vision_utils.py` (the tower). The layouts:

    nested    layer_0/attn/q_einsum/w, layer_0/mlp/linear           what the library saves, and what is written here
    kauldron  the same under params/, beside a training state       unwrapped by `bridge.names.unwrap`
    flat      transformer/layer_0/attn/q_einsum/w, .../mlp/linear/w  what Gemma was released as
    stacked   transformer/stacked_layers/attention_type_0/...        layers of one attention type, along dimension 0

N heads of H numbers, K of them for keys and values, D the width, F that of the feed-forward: q_einsum (N, D, H),
kv_einsum (2, K, D, H), or both as qkv_einsum (3, N, D, H) where K is N; attn_vec_einsum (N, H, D); gating_einsum
(2, F, D), or (2, D, F) in Gemma 1 and 2 2B; linear (F, D). Norms hold the weight that 1 is added to, as in torch.
Rows of the embedding beyond the vocabulary of the config are padding and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.computed_transforms import cut, split_heads, unfolded
from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, stacked, with_batch
from easytorch.bridge.rules.table import TIED, Rule, Rules
from easytorch.bridge.rules.transforms import Transform, get_transform
from easytorch.bridge.schemes.gemma_config import gemma_config

_FAMILIES = ("gemma", "gemma2", "gemma3_text", "gemma3")
_EMBEDDING = "embedder/input_embedding"
_STACK = "stacked_layers/attention_type_"
# torch's norms, in the order of the layer.
_NORMS = {
    "gemma": {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "pre_ffw_norm"},
    "gemma2": {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
# The one Gemma 2 whose gating is (2, D, F): its F and D.
_GEMMA_2_2B = (9216, 2304)


class GemmaTree:
    """DeepMind's Gemma, in any of the library's layouts."""

    name = "gemma"
    by_outline = True

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """Whether there is the library's embedding and an attention of its kind."""
        return f"{_under(tensors)}{_EMBEDDING}" in tensors and any(
            name.endswith("/attn/attn_vec_einsum/w") for name in tensors
        )

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """A row per leaf, for the layers and heads of `config`; the nested layout when writing."""
        if config.model_type not in _FAMILIES:
            raise CheckpointError(
                f"Gemma's names are those of {', '.join(_FAMILIES)}, and not of {config.model_type!r}", file=config.file
            )
        table = _Table(config, architecture, {} if tensors is None else tensors)
        return (*table.text(), *table.vision())

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """The config of a Gemma whose sizes are known or decide nothing else; None for a Gemma 3 of unknown size."""
        under = _under(tensors)
        return gemma_config({name.removeprefix(under): info.shape for name, info in tensors.items()})


def _under(tensors: Mapping[str, TensorInfo]) -> str:
    """The prefix of the text model's names."""
    return "transformer/" if f"transformer/{_EMBEDDING}" in tensors else ""


class _Table:
    """The rows of one model, to or from `tensors` where they are given."""

    def __init__(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> None:
        self._config = config
        self._tensors = tensors
        self._shapes = architecture.shapes
        self._tie = architecture.tie
        self._under = _under(tensors)
        self._text = (
            config.content.get("text_config", config.content) if config.model_type == "gemma3" else config.content
        )
        embedding = next(name for name in self._shapes if name.endswith("embed_tokens.weight"))
        self._base = embedding.removesuffix("embed_tokens.weight")
        self._words = self._shapes[embedding][0]
        self._head_dim = self._head_size()
        self._heads = self._shape("layers.0.self_attn.q_proj.weight")[0] // self._head_dim
        self._kv_heads = self._shape("layers.0.self_attn.k_proj.weight")[0] // self._head_dim
        self._layers = sum(name.endswith(".self_attn.q_proj.weight") and self._base in name for name in self._shapes)
        self._gate = "identity" if self._rows_of_gating() else "linear"

    def _head_size(self) -> int:
        """The head size, from the leaf's shape, else from the config."""
        for name, info in self._tensors.items():
            if name.endswith("/attn/attn_vec_einsum/w") and len(info.shape) >= 3:
                return info.shape[-2]
        size = self._text.get("head_dim", 256)
        rows = self._shape("layers.0.self_attn.k_proj.weight")[0]
        if type(size) is not int or size <= 0 or rows % size:
            raise CheckpointError(f"`head_dim` is {size!r}, the keys have {rows} rows", file=self._config.file)
        return size

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[f"{self._base}{name}"]

    def _rows_of_gating(self) -> bool:
        """Whether the gating is (2, F, D)."""
        inner, width = self._shape("layers.0.mlp.gate_proj.weight")
        for name, info in self._tensors.items():
            if re.search(r"/mlp/gating_einsum(/w)?$", name) and inner != width:
                return info.shape[-2:] == (inner, width)
        return self._config.model_type != "gemma" and (inner, width) != _GEMMA_2_2B

    def text(self) -> Iterator[Rule]:
        """The language model."""
        embedding: Transform = get_transform("identity")
        leaf = self._tensors.get(f"{self._under}{_EMBEDDING}")
        if leaf is not None and len(leaf.shape) == 2 and leaf.shape[0] > self._words:
            embedding = cut(embedding, self._words, 0)
        yield f"{self._base}embed_tokens.weight", f"{self._under}{_EMBEDDING}", embedding
        for numbers, path in self._blocks():
            yield from self._block(numbers, f"{self._under}{path}")
        yield f"{self._base}norm.weight", f"{self._under}final_norm/scale", "identity"
        for head in (name for name in self._shapes if name.endswith("lm_head.weight")):
            yield head, f"{self._under}{_EMBEDDING}", TIED

    def _blocks(self) -> list[tuple[list[int] | int, str]]:
        """The layers of each subtree, numbers where they are stacked, and its path."""
        kinds = {int(found[1]) for name in self._tensors if (found := re.search(rf"{_STACK}(\d{{1,6}})/", name))}
        if not kinds:
            return [(number, f"layer_{number}") for number in range(self._layers)]
        step = max(kinds) + 1
        return [(list(range(kind, self._layers, step)), f"{_STACK}{kind}") for kind in range(step)]

    def _block(self, numbers: list[int] | int, path: str) -> Iterator[Rule]:
        heads, kv_heads = (split_heads(count, 0, (0, 2, 1)) for count in (self._heads, self._kv_heads))
        linear, identity = get_transform("linear"), get_transform("identity")
        leaves: list[tuple[tuple[str, ...], str, Transform]] = []
        if self._heads == self._kv_heads:
            leaves.append((("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn/qkv_einsum/w", heads))
        else:
            leaves.append((("self_attn.q_proj",), "attn/q_einsum/w", heads))
            leaves.append((("self_attn.k_proj", "self_attn.v_proj"), "attn/kv_einsum/w", kv_heads))
        leaves.append((("self_attn.o_proj",), "attn/attn_vec_einsum/w", heads_in(self._heads)))
        if f"{self._base}layers.0.self_attn.q_norm.weight" in self._shapes:
            leaves.append((("self_attn.q_norm",), "attn/_query_norm/scale", identity))
            leaves.append((("self_attn.k_norm",), "attn/_key_norm/scale", identity))
        leaves.append((("mlp.gate_proj", "mlp.up_proj"), self._mlp(path, "gating_einsum"), get_transform(self._gate)))
        leaves.append((("mlp.down_proj",), self._mlp(path, "linear"), linear))
        norms = _NORMS["gemma" if self._config.model_type == "gemma" else "gemma2"]
        leaves += [((torch,), f"{norm}/scale", identity) for torch, norm in norms.items()]
        for names, leaf, transform in leaves:
            yield self._row(names, numbers, f"{path}/{leaf}", transform)

    def _mlp(self, path: str, name: str) -> str:
        """`mlp/linear`, or `mlp/linear/w` as the flat layout has it."""
        return f"mlp/{name}/w" if f"{path}/mlp/{name}/w" in self._tensors else f"mlp/{name}"

    def _row(self, names: Sequence[str], numbers: list[int] | int, path: str, transform: Transform) -> Rule:
        listed = [numbers] if isinstance(numbers, int) else numbers
        torch = tuple(f"{self._base}layers.{number}.{name}.weight" for number in listed for name in names)
        if len(names) > 1 or not isinstance(numbers, int):
            transform = stacked(transform, len(torch), 0)
        if len(names) > 1 and not isinstance(numbers, int):
            transform = unfolded(transform, (len(listed), len(names)))
        return (torch[0] if isinstance(numbers, int) and len(names) == 1 else torch, path, transform)

    def vision(self) -> Iterator[Rule]:
        """The tower and what joins it to the text; nothing for a text model."""
        patches = next((name for name in self._shapes if name.endswith("embeddings.patch_embedding.weight")), None)
        if patches is None:
            return
        tower = patches.removesuffix("embeddings.patch_embedding.weight")
        projector = next(name for name in self._shapes if name.endswith("mm_input_projection_weight"))
        projector = projector.removesuffix("mm_input_projection_weight")
        root = "SigLiPFromPatches_0" if self._under else "vision_encoder"
        root = f"{root}/siglip_encoder"
        yield f"{projector}mm_input_projection_weight", f"{self._under}embedder/mm_input_projection/w", "identity"
        yield f"{projector}mm_soft_emb_norm.weight", f"{self._under}embedder/mm_soft_embedding_norm/scale", "identity"
        yield patches, f"{root}/embedding/kernel", "conv2d"
        yield f"{tower}embeddings.patch_embedding.bias", f"{root}/embedding/bias", "identity"
        yield f"{tower}embeddings.position_embedding.weight", f"{root}/pos_embedding", with_batch
        yield from _norm(f"{tower}post_layernorm", f"{root}/Transformer/encoder_norm")
        layers = sum(name.startswith(tower) and name.endswith(".self_attn.q_proj.weight") for name in self._shapes)
        for number in range(layers):
            yield from self._vision_block(
                f"{tower}encoder.layers.{number}", f"{root}/Transformer/encoderblock_{number}"
            )

    def _vision_block(self, torch: str, path: str) -> Iterator[Rule]:
        heads = self._config.content.get("vision_config", {}).get("num_attention_heads")
        if type(heads) is not int or heads <= 0:
            raise CheckpointError("`vision_config` has no `num_attention_heads`; add it", file=self._config.file)
        attention = f"{path}/MultiHeadDotProductAttention_0"
        for name, leaf in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            yield f"{torch}.self_attn.{name}.weight", f"{attention}/{leaf}/kernel", heads_out(heads)
            yield f"{torch}.self_attn.{name}.bias", f"{attention}/{leaf}/bias", heads_bias(heads)
        yield f"{torch}.self_attn.out_proj.weight", f"{attention}/out/kernel", heads_in(heads)
        yield f"{torch}.self_attn.out_proj.bias", f"{attention}/out/bias", "identity"
        for number in (1, 2):
            yield from _norm(f"{torch}.layer_norm{number}", f"{path}/LayerNorm_{number - 1}")
            yield f"{torch}.mlp.fc{number}.weight", f"{path}/MlpBlock_0/Dense_{number - 1}/kernel", "linear"
            yield f"{torch}.mlp.fc{number}.bias", f"{path}/MlpBlock_0/Dense_{number - 1}/bias", "identity"


def _norm(torch: str, path: str) -> Iterator[Rule]:
    yield f"{torch}.weight", f"{path}/scale", "identity"
    yield f"{torch}.bias", f"{path}/bias", "identity"
