"""MaxText: decoders of Llama, Mistral, Mixtral, Qwen 2 and 3 (dense and experts) and Gemma 1 to 3, text only.

Source: AI-Hypercomputer/maxtext, `checkpoint_conversion/utils/param_mapping.py`, `standalone_scripts/
llama_or_mistral_ckpt.py` and `convert_gemma*_chkpt.py`, `layers/attentions.py`, `layers/embeddings.py`,
`layers/normalizations.py`. What is particular there:

- `maxtext` has all layers stacked along dimension 1 of each leaf (`scan_layers`, `param_scan_axis: 1`), experts before
  them; `maxtext-unscanned` has a subtree `layers_N` per layer. Gemma 2 pairs its layers (`_local`, `_global`); Gemma 3
  scans six at a time (`layers/layers_0` ... `layers/layers_5`) and keeps the rest in `layers_remainder`.
- Queries carry the factor of the scores (1 / sqrt(d)), but for Qwen and Gemma 3.
- Llama's queries and keys are interleaved for rotary, for MaxText's `rope_type: llama3.1`. Its `rope_type: default`
  (which its Llama 2 has) is not: config.json can say `"maxtext_rope_type": "default"`.
- Gemma's norms hold 1 + weight and its embedding the factor sqrt(D).

Factors are computed in float64; leaves they would round in a 16-bit checkpoint are float32 (MaxText restores into
its own `weight_dtype`). Of float32 weights such a leaf is rounded once each way, unless the factor is a power of two.
A vocabulary padded by MaxText is cropped to that of the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any

import ml_dtypes
import numpy as np

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.computed_transforms import cut, interleaved, scaled, shifted, unfolded
from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, stacked
from easytorch.bridge.rules.table import TIED, Rule, Rules
from easytorch.bridge.rules.transforms import Transform, get_transform

_WRITTEN_UNDER = "params/params/"
_LANDMARKS = ("decoder/decoder_norm/scale", "token_embedder/embedding")
_SIXTEEN_BITS = ("bfloat16", "float16")
_GEMMA_3_PATTERN = 6


@dataclass(frozen=True)
class _Family:
    """How a family's decoder differs from others. `query`: whether queries include the scores' factor."""

    query: bool = True
    rotary: bool = False
    gemma: bool = False
    experts: tuple[str, str] | None = None
    norms: Sequence[tuple[str, str]] = (
        ("input_layernorm", "pre_self_attention_layer_norm"),
        ("post_attention_layernorm", "post_self_attention_layer_norm"),
    )


# Gemma 1's and, with two more, Gemma 2's and 3's.
_NORMS_1 = (("input_layernorm", "pre_self_attention_norm"), ("post_attention_layernorm", "pre_ffw_norm"))
_NORMS_2 = (
    ("input_layernorm", "pre_self_attention_norm"),
    ("post_attention_layernorm", "post_self_attention_norm"),
    ("pre_feedforward_layernorm", "pre_ffw_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)
# torch block, MaxText block.
_MIXTRAL, _QWEN_MOE = ("block_sparse_moe", "MoeBlock_0"), ("mlp", "moe_block")
_FAMILIES = {
    "llama": _Family(rotary=True),
    "mistral": _Family(),
    "mixtral": _Family(experts=_MIXTRAL),
    "qwen2": _Family(query=False),
    "qwen3": _Family(query=False),
    "qwen3_moe": _Family(query=False, experts=_QWEN_MOE),
    "gemma": _Family(gemma=True, norms=_NORMS_1),
    "gemma2": _Family(gemma=True, norms=_NORMS_2),
    "gemma3_text": _Family(query=False, gemma=True, norms=_NORMS_2),
}
_EXPERT_NAMES = {"block_sparse_moe": ("w1", "w3", "w2"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class MaxTextTree:
    """MaxText's names, stacked (`scanned`) or with a subtree for every layer."""

    by_outline = True

    def __init__(self, *, scanned: bool) -> None:
        self.name = "maxtext" if scanned else "maxtext-unscanned"
        self._scanned = scanned

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """Whether there is a MaxText decoder of this layout; T5X, whose names are alike, keeps kernels flat."""
        under = _under(tensors)
        if under is None:
            return False
        layers = [name for name in tensors if name.startswith(f"{under}decoder/layers")]
        queries = [tensors[name] for name in layers if re.search(r"/self_attention(_\w+)?/query/kernel$", name)]
        # A Gemma 3 of fewer than six layers has only the remainder.
        stacks = tuple(f"{under}decoder/{name}/" for name in ("layers", "layers_remainder"))
        scanned = any(name.startswith(stacks) for name in layers)
        return scanned == self._scanned and bool(queries) and all(len(query.shape) >= 3 for query in queries)

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """A row per leaf, for the layers, heads and experts of `config`."""
        if config.model_type not in _FAMILIES:
            raise CheckpointError(
                f"MaxText's names are known here for {', '.join(_FAMILIES)}, and not for {config.model_type!r}",
                file=config.file,
            )
        return _Table(config, architecture, tensors, self._scanned).rows()

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """None: the names of Llama and Mistral are the same, and the rotary base is in no tensor."""
        return None


def _under(tensors: Iterable[str]) -> str | None:
    """The prefix of the names of a MaxText tree, None for another tree."""
    names = set(tensors)
    for under in ("", "params/", _WRITTEN_UNDER):
        if all(f"{under}{landmark}" in names for landmark in _LANDMARKS):
            return under
    return None


class _Table:
    """The rows of one model. Layers are given as lists of numbers: one leaf holds those of a list, stacked."""

    def __init__(
        self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None, scanned: bool
    ) -> None:
        self._family = _FAMILIES[config.model_type]
        self._config = config
        self._shapes = architecture.shapes
        self._tie = architecture.tie
        self._apart = "lm_head.weight" in architecture.apart
        self._scanned = scanned
        self._tensors = tensors
        self._under = _WRITTEN_UNDER if tensors is None else _under(tensors) or ""
        self._base = "model." if "model.embed_tokens.weight" in architecture.shapes else ""
        self._layers = self._number("num_hidden_layers")
        self._hidden = self._number("hidden_size")
        self._heads = self._number("num_attention_heads")
        self._head_dim = self._shape("layers.0.self_attn.q_proj.weight")[0] // self._heads
        self._kv_heads = self._shape("layers.0.self_attn.k_proj.weight")[0] // self._head_dim
        self._axis = self._scan_axis()
        self._narrow = self._sixteen_bits()
        self._sixteen_bit_config = config.content.get("dtype", config.content.get("torch_dtype")) == "float16"

    def _number(self, key: str) -> int:
        value = self._config.content.get(key)
        if type(value) is not int or value <= 0:
            raise CheckpointError(f"`{key}` is {value!r}; it is a number above 0", file=self._config.file)
        return value

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[f"{self._base}{name}"]

    def _leaf(self, path: str) -> TensorInfo | None:
        return None if self._tensors is None else self._tensors.get(f"{self._under}{path}")

    def _scan_axis(self) -> int:
        """1 unless the norms, which are square at most by accident, say 0."""
        ends = tuple(f"/{name}/scale" for _, norm in self._family.norms for name in (norm, f"{norm}_local"))
        stacks = [
            info.shape
            for name, info in (self._tensors or {}).items()
            if name.startswith(f"{self._under}decoder/layers/") and name.endswith(ends)
        ]
        return 0 if stacks and all(shape[-1] == self._hidden != shape[0] for shape in stacks) else 1

    def _sixteen_bits(self) -> str | None:
        """The dtype of a 16-bit checkpoint, from kernels that no factor is applied to; None for others."""
        found = {info.dtype for name, info in (self._tensors or {}).items() if name.endswith("/value/kernel")}
        return found.pop() if len(found) == 1 and found <= set(_SIXTEEN_BITS) else None

    def rows(self) -> Rules:
        embedding, factor = self._vocabulary(get_transform("identity"), "token_embedder/embedding", 0), None
        if self._family.gemma:
            factor = float(np.sqrt(self._hidden))
            if self._config.model_type == "gemma3_text":
                # The type MaxText's converter computes this one factor in, and Gemma 3 its forward.
                factor = float(ml_dtypes.bfloat16(factor))
        rows = [self._row(["embed_tokens.weight"], "token_embedder/embedding", self._times(embedding, factor))]
        for numbers, path, suffix in self._blocks():
            rows += self._block(numbers, f"decoder/{path}", suffix)
        rows.append(self._row(["norm.weight"], "decoder/decoder_norm/scale", self._norm()))
        if "lm_head.weight" in self._shapes:
            if self._tie:
                rows.append(("lm_head.weight", f"{self._under}token_embedder/embedding", TIED))
            if not self._tie or self._apart or self._leaf("decoder/logits_dense/kernel") is not None:
                head = self._vocabulary(get_transform("linear"), "decoder/logits_dense/kernel", 1)
                rows.append(("lm_head.weight", f"{self._under}decoder/logits_dense/kernel", head))
        return tuple(rows)

    def _row(self, names: Sequence[str], path: str, transform: Transform) -> Rule:
        torch = tuple(f"{self._base}{name}" for name in names)
        return (torch[0] if len(torch) == 1 else torch, f"{self._under}{path}", transform)

    def _blocks(self) -> list[tuple[list[int], str, str]]:
        """The layers of each subtree of leaves, its path under the decoder, and the suffix of its names."""
        numbers = list(range(self._layers))
        if self._config.model_type == "gemma2":
            halves = [(numbers[place::2], f"_{kind}") for place, kind in enumerate(("local", "global"))]
            if self._scanned:
                return [(half, "layers", kind) for half, kind in halves]
            return [([number], f"layers_{pair}", kind) for half, kind in halves for pair, number in enumerate(half)]
        if not self._scanned:
            return [([number], f"layers_{number}", "") for number in numbers]
        if self._config.model_type == "gemma3_text":
            whole = self._layers - self._layers % _GEMMA_3_PATTERN
            scanned = [
                (numbers[place:whole:_GEMMA_3_PATTERN], f"layers/layers_{place}", "")
                for place in range(_GEMMA_3_PATTERN)
                if place < whole
            ]
            rest = [([n], f"layers_remainder/layers_{place}", "") for place, n in enumerate(numbers[whole:])]
            return scanned + rest
        return [(numbers, "layers", "")]

    def _block(self, numbers: list[int], path: str, suffix: str) -> list[Rule]:
        family, own = self._family, f"layers.{numbers[0]}"
        stack = self._scanned and "layers_remainder" not in path
        wide = frexp(self._score_factor)[0] != 0.5 or self._sixteen_bit_config
        query: Transform = heads_out(self._heads)
        key: Transform = heads_out(self._kv_heads)
        if family.rotary and self._config.content.get("maxtext_rope_type") != "default":
            query, key = interleaved(query, self._heads), interleaved(key, self._kv_heads)
        if family.query:
            query = scaled(query, self._score_factor, wide=wide, narrow=self._narrow_of(path, suffix, "query"))
        linear = get_transform("linear")
        attention = f"self_attention{suffix}"
        leaves: list[tuple[str, str, Transform]] = [
            ("self_attn.q_proj.weight", f"{attention}/query/kernel", query),
            ("self_attn.k_proj.weight", f"{attention}/key/kernel", key),
            ("self_attn.v_proj.weight", f"{attention}/value/kernel", heads_out(self._kv_heads)),
            ("self_attn.o_proj.weight", f"{attention}/out/kernel", heads_in(self._heads)),
            ("self_attn.q_proj.bias", f"{attention}/query/bias", heads_bias(self._heads)),
            ("self_attn.k_proj.bias", f"{attention}/key/bias", heads_bias(self._kv_heads)),
            ("self_attn.v_proj.bias", f"{attention}/value/bias", heads_bias(self._kv_heads)),
            ("self_attn.q_norm.weight", f"{attention}/query_norm/scale", self._norm()),
            ("self_attn.k_norm.weight", f"{attention}/key_norm/scale", self._norm()),
            ("mlp.gate_proj.weight", f"mlp{suffix}/wi_0/kernel", linear),
            ("mlp.up_proj.weight", f"mlp{suffix}/wi_1/kernel", linear),
            ("mlp.down_proj.weight", f"mlp{suffix}/wo/kernel", linear),
        ]
        leaves += [(f"{torch}.weight", f"{norm}{suffix}/scale", self._norm()) for torch, norm in family.norms]
        rows = []
        for name, leaf, transform in leaves:
            if f"{self._base}{own}.{name}" in self._shapes:
                names = [f"layers.{number}.{name}" for number in numbers]
                rows.append(self._row(names, f"{path}/{leaf}", self._stacked(transform, numbers, stack)))
        return rows if family.experts is None else rows + self._experts(numbers, path, *family.experts, stack)

    def _experts(self, numbers: list[int], path: str, torch: str, block: str, stack: bool) -> list[Rule]:
        linear = get_transform("linear")
        count = self._number("num_local_experts" if "num_local_experts" in self._config.content else "num_experts")
        gates = [f"layers.{number}.{torch}.gate.weight" for number in numbers]
        rows = [self._row(gates, f"{path}/{block}/gate/kernel", self._stacked(linear, numbers, stack))]
        for name, leaf in zip(_EXPERT_NAMES[torch], ("wi_0", "wi_1", "wo"), strict=True):
            # The first dimension is the expert, the second the layer.
            experts = [f"layers.{n}.{torch}.experts.{one}.{name}.weight" for one in range(count) for n in numbers]
            transform = stacked(linear, len(experts), 0)
            if stack:
                transform = unfolded(transform, (count, len(numbers)))
            rows.append(self._row(experts, f"{path}/{block}/{leaf}", transform))
        return rows

    def _stacked(self, transform: Transform, numbers: list[int], stack: bool) -> Transform:
        return stacked(transform, len(numbers), self._axis) if stack else transform

    @property
    def _score_factor(self) -> float:
        size = self._config.content.get("query_pre_attn_scalar", self._head_dim)
        factor: float = float(size) ** -0.5
        return factor

    def _narrow_of(self, path: str, suffix: str, name: str) -> str | None:
        leaf = self._leaf(f"{path}/self_attention{suffix}/{name}/kernel")
        return self._narrow if leaf is not None and leaf.dtype == "float32" else None

    def _norm(self) -> Transform:
        identity = get_transform("identity")
        norm = self._leaf("decoder/decoder_norm/scale")
        narrow = self._narrow if norm is not None and norm.dtype == "float32" else None
        return shifted(identity, 1.0, wide=True, narrow=narrow) if self._family.gemma else identity

    def _times(self, transform: Transform, factor: float | None) -> Transform:
        leaf = self._leaf("token_embedder/embedding")
        narrow = self._narrow if leaf is not None and leaf.dtype == "float32" else None
        wide = factor is not None and (frexp(factor)[0] != 0.5 or self._sixteen_bit_config)
        return transform if factor is None else scaled(transform, factor, wide=wide, narrow=narrow)

    def _vocabulary(self, transform: Transform, path: str, axis: int) -> Transform:
        """`transform`, of a leaf whose dimension `axis` may be longer than the vocabulary."""
        leaf = self._leaf(path)
        words = self._shape("embed_tokens.weight")[0]
        if leaf is None or len(leaf.shape) != 2 or leaf.shape[axis] <= words:
            return transform
        return cut(transform, words, axis)
