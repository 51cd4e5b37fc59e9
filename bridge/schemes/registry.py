"""The registered naming schemes, and which of them a checkpoint's names follow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo

if TYPE_CHECKING:
    from easytorch.bridge.schemes.base import Scheme

# Torch's own names, the hub through which every other scheme is converted.
TORCH = "torch"
# The most specific first; the last one accepts every tree.
_NAMES = ("gguf", "gemma", "big_vision", "maxtext", "maxtext-unscanned", "t5x", "easydel", "flax")


@cache
def _scheme(name: str) -> Scheme:
    """The scheme, which is imported here: of most checkpoints one is needed, of those with torch's names none."""
    if name == "gguf":
        from easytorch.bridge.schemes.gguf_names import GgufNames

        return GgufNames()
    if name == "gemma":
        from easytorch.bridge.schemes.gemma_tree import GemmaTree

        return GemmaTree()
    if name == "big_vision":
        from easytorch.bridge.schemes.big_vision_tree import BigVisionTree

        return BigVisionTree()
    if name in ("maxtext", "maxtext-unscanned"):
        from easytorch.bridge.schemes.maxtext_tree import MaxTextTree

        return MaxTextTree(scanned=name == "maxtext")
    if name == "t5x":
        from easytorch.bridge.schemes.t5x_tree import T5xTree

        return T5xTree()
    if name == "easydel":
        from easytorch.bridge.schemes.easydel_tree import EasydelTree

        return EasydelTree()
    from easytorch.bridge.schemes.flax_tree import FlaxTree

    return FlaxTree()


def names() -> list[str]:
    """Every scheme, torch's own included."""
    return [TORCH, *_NAMES]


def get_scheme(name: str) -> Scheme:
    """The scheme `name`, which is not torch's; `ValueError` listing the known ones otherwise."""
    if name not in _NAMES:
        raise ValueError(f"no naming scheme is called {name!r}; known: {', '.join(names())}")
    return _scheme(name)


def recognise(tensors: Mapping[str, TensorInfo], config: Config | None, usual: str | None = None) -> Scheme:
    """The first scheme that recognises `tensors`; `usual` for ambiguous names."""
    found = next(scheme for scheme in map(_scheme, _NAMES) if scheme.recognises(tensors, config))
    return get_scheme(usual) if usual is not None and found.name == _NAMES[-1] else found
