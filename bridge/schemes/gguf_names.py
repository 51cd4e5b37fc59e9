"""GGUF: llama.cpp's names and layouts of the architectures it runs.

Names come from the gguf package's own map (`get_tensor_name_map`). The changes of layout are those of llama.cpp's
`convert_hf_to_gguf.py` (its `conversion` package, 2026), against which they were compared tensor for tensor: Llama's
queries and keys interleaved for its rotary embedding, Gemma's norms with their 1 added, GPT-2's weights transposed, the
fused projections of Bloom and Falcon regrouped by kind, experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from easytorch.bridge.core.config import Config, settings_of
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats.gguf_files.blocks import require_gguf
from easytorch.bridge.formats.gguf_files.config import arch_of
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.table import BUFFER, TIED, Rule, Rules
from easytorch.bridge.rules.transforms import Arrays, Shape, Transform

_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
# One of several alike: an expert's weight, or the norm of one head (StableLM).
_ONE_OF = re.compile(r"(?P<before>.+)\.(?:experts|norms)\.\d+(?:\.(?P<weight>\w+))?\.weight")
# What llama.cpp leaves behind: it runs these models for their embeddings.
_UNUSED = re.compile(r"(?:bert\.)?pooler\.dense\.\w+|cls\.\w.*|(?:\w+\.)?embeddings\.position_ids")


class GgufNames:
    """The scheme of GGUF files."""

    name = "gguf"
    by_outline = False

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """Whether the token embedding has GGUF's name."""
        return "token_embd.weight" in tensors

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """A row for every tensor of the model; `CheckpointError` for a family that GGUF has no names for."""
        return tuple(_Table(config, architecture).rows())

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """None: a GGUF file states it (`formats.gguf_files.file.GgufReader.config`)."""
        return None


class _Table:
    def __init__(self, config: Config, architecture: Architecture) -> None:
        require_gguf()
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._settings = settings_of(config)
        self._family = config.model_type
        self._file = config.file
        self._architecture = architecture
        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch_of(config))
        layers = max(self._settings.num_hidden_layers, getattr(self._settings, "num_decoder_layers", None) or 0)
        self._names = get_tensor_name_map(arch, layers)
        self._changes = _CHANGES.get(self._family, _unchanged)(self._settings)

    def rows(self) -> Iterator[Rule]:
        alike: dict[str, list[str]] = {}
        for name in self._architecture.shapes:
            if _UNUSED.fullmatch(name):
                yield name, None, BUFFER
            elif (one := _ONE_OF.fullmatch(name)) is not None:
                alike.setdefault(f"{one['before']}/{one['weight'] or ''}", []).append(name)
            elif name.endswith("coder.embed_tokens.weight"):
                yield name, self._leaf("shared.weight"), TIED
            elif name == "lm_head.weight" and self._architecture.tie and self._names.get_name("lm_head") is None:
                continue
            else:
                yield name, self._leaf(name), self._changes(name)
        for key, names in alike.items():
            before, _, weight = key.partition("/")
            leaf = (
                f"blk.{_block(before)}.ffn_{_EXPERTS[weight]}_exps.weight" if weight else self._leaf(before, ".weight")
            )
            yield tuple(names), leaf, stacked(len(names))
        if self._architecture.tie:
            for name in ("lm_head.weight", "embed_out.weight"):
                if name in self._architecture.shapes:
                    yield name, "token_embd.weight", TIED

    def _leaf(self, name: str, suffix: str = "") -> str:
        base = f"{self._architecture.base}."
        for tried in (name, name.removeprefix(base), f"{base}{name}", f"model.{name}"):
            if (found := self._names.get_name(tried, (".weight", ".bias"))) is not None:
                return found + suffix
        message = f"GGUF has no name for it in a {self._family} model{nearest(name, self._names.mapping)}"
        raise CheckpointError(
            f"{message}; give the model without this head, or add the name to the table", file=self._file, tensor=name
        )


def _block(name: str) -> str:
    return next(part for part in name.split(".") if part.isdecimal())


def stacked(count: int) -> Transform:
    """`count` torch tensors as one, along a new first dimension."""

    def apart(shape: Shape) -> list[Shape]:
        if shape[:1] != (count,):
            raise CheckpointError(f"has shape {shape}, and the config says that it is {count} tensors stacked")
        return [shape[1:]] * count

    return Transform(
        name=f"stack of {count}",
        to_flax=lambda arrays: np.stack(arrays),
        to_torch=lambda array: tuple(array),
        flax_shape=lambda shapes: (count, *shapes[0]),
        torch_shapes=apart,
        parts=count,
    )


def _regrouped(name: str, split: tuple[int, ...], order: tuple[int, ...]) -> Transform:
    """The rows of one tensor, seen as a grid of `split` (then the rest), with the grid's axes in another `order`."""
    back = tuple(order.index(axis) for axis in range(len(order)))
    turned = tuple(split[axis] for axis in order)

    def move(array: np.ndarray, grid: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
        rest = array.shape[1:]
        kept = tuple(range(len(axes), len(axes) + 1 + len(rest)))
        return array.reshape(*grid, -1, *rest).transpose(*axes, *kept).reshape(array.shape)

    def same(shape: Shape) -> Shape:
        if not shape or shape[0] % int(np.prod(split)):
            raise CheckpointError(f"has shape {shape}, which the config's heads do not divide")
        return shape

    return Transform(
        name=name,
        to_flax=lambda arrays: move(arrays[0], split, order),
        to_torch=lambda array: (move(array, turned, back),),
        flax_shape=lambda shapes: same(shapes[0]),
        torch_shapes=lambda shape: (same(shape),),
        moves_rows=True,
    )


def interleaved(heads: int) -> Transform:
    """Rotary pairs side by side: within a head, torch has all first halves before all second ones."""
    name = f"interleaved over {heads} heads"

    def move(array: np.ndarray, back: bool) -> np.ndarray:
        middle = (-1, 2) if back else (2, -1)
        return array.reshape(heads, *middle, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def same(shape: Shape) -> Shape:
        if not shape or shape[0] % (2 * heads):
            raise CheckpointError(f"has shape {shape}, which {heads} heads of rotary pairs do not divide")
        return shape

    return Transform(
        name=name,
        to_flax=lambda arrays: move(arrays[0], False),
        to_torch=lambda array: (move(array, True),),
        flax_shape=lambda shapes: same(shapes[0]),
        torch_shapes=lambda shape: (same(shape),),
        moves_rows=True,
    )


def _falcon_groups(heads: int, groups: int) -> Transform:
    """Falcon's rows: each key-value group's queries, key and value in torch; all queries, all keys, all values here."""
    each = heads // groups

    def grid(array: np.ndarray) -> np.ndarray:
        return array.reshape(groups, each + 2, -1, *array.shape[1:])

    def to_flax(arrays: Arrays) -> np.ndarray:
        rows = grid(arrays[0])
        parts = [rows[:, :each], rows[:, each:-1], rows[:, -1:]]
        return np.concatenate([part.reshape(-1, *arrays[0].shape[1:]) for part in parts])

    def to_torch(array: np.ndarray) -> Arrays:
        rest = array.shape[1:]
        head = array.shape[0] // (heads + 2 * groups)
        ends = (heads * head, (heads + groups) * head)
        query, key, value = (part.reshape(groups, -1, head, *rest) for part in np.split(array, ends))
        return (np.concatenate([query, key, value], axis=1).reshape(array.shape),)

    def same(shape: Shape) -> Shape:
        if not shape or shape[0] % (heads + 2 * groups):
            raise CheckpointError(f"has shape {shape}, which {heads} heads and {groups} groups do not divide")
        return shape

    return Transform(
        name=f"falcon qkv of {heads} heads in {groups} groups",
        to_flax=to_flax,
        to_torch=to_torch,
        flax_shape=lambda shapes: same(shapes[0]),
        torch_shapes=lambda shape: (same(shape),),
        moves_rows=True,
    )


# llama.cpp multiplies by the norm weight alone. The sum is taken, and kept, in float32.
_ONE_ADDED = Transform(
    name="one added",
    to_flax=lambda arrays: arrays[0].astype(np.float32) + np.float32(1),
    to_torch=lambda array: (array - np.float32(1),),
    flax_shape=lambda shapes: shapes[0],
    torch_shapes=lambda shape: (shape,),
    flax_dtype="float32",
)
# The gate of the shared expert: torch (1, hidden), here (hidden,), which ggml does not distinguish from (1, hidden).
_ONE_ROW = Transform(
    name="one row",
    to_flax=lambda arrays: arrays[0].reshape(-1),
    to_torch=lambda array: (array.reshape(1, -1),),
    flax_shape=lambda shapes: (int(np.prod(shapes[0])),),
    torch_shapes=lambda shape: ((1, int(np.prod(shape))),),
)

Change = Callable[[str], str | Transform]


def _unchanged(settings: Any) -> Change:
    return lambda name: "identity"


def _llama(settings: Any) -> Change:
    query = interleaved(settings.num_attention_heads)
    key = interleaved(settings.num_key_value_heads)

    def change(name: str) -> str | Transform:
        if ".q_proj." in name:
            return query
        return key if ".k_proj." in name else "identity"

    return change


def _gemma(settings: Any) -> Change:
    return lambda name: _ONE_ADDED if name.endswith("norm.weight") else "identity"


def _gpt2(settings: Any) -> Change:
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return lambda name: "linear" if name.endswith(turned) else "identity"


def _qwen_moe(settings: Any) -> Change:
    return lambda name: _ONE_ROW if name.endswith("shared_expert_gate.weight") else "identity"


def _bloom(settings: Any) -> Change:
    fused = _regrouped(f"bloom qkv of {settings.n_head} heads", (settings.n_head, 3), (1, 0))
    return lambda name: fused if ".query_key_value." in name else "identity"


def _falcon(settings: Any) -> Change:
    heads = settings.num_attention_heads
    groups = settings.num_kv_heads if settings.new_decoder_architecture else 1 if settings.multi_query else heads
    fused = _falcon_groups(heads, groups)
    return lambda name: fused if ".query_key_value." in name else "identity"


_CHANGES: dict[str, Callable[[Any], Change]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), _llama),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gemma),
    "gpt2": _gpt2,
    "qwen2_moe": _qwen_moe,
    "bloom": _bloom,
    "falcon": _falcon,
}
