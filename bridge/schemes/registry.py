"""The naming schemes there are, and which of them a checkpoint's names follow."""

from __future__ import annotations

from collections.abc import Mapping

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.schemes.base import Scheme
from easytorch.bridge.schemes.big_vision_tree import BigVisionTree
from easytorch.bridge.schemes.easydel_tree import EasydelTree
from easytorch.bridge.schemes.flax_tree import FlaxTree
from easytorch.bridge.schemes.gemma_tree import GemmaTree
from easytorch.bridge.schemes.gguf_names import GgufNames
from easytorch.bridge.schemes.maxtext_tree import MaxTextTree
from easytorch.bridge.schemes.t5x_tree import T5xTree

# Torch's own names, the hub through which every other scheme is converted.
TORCH = "torch"

# The most particular first; the last one takes every tree.
_SCHEMES: tuple[Scheme, ...] = (
    GgufNames(),
    GemmaTree(),
    BigVisionTree(),
    MaxTextTree(scanned=True),
    MaxTextTree(scanned=False),
    T5xTree(),
    EasydelTree(),
    FlaxTree(),
)


def names() -> list[str]:
    """Every scheme, torch's own included."""
    return [TORCH, *(scheme.name for scheme in _SCHEMES)]


def scheme_called(name: str) -> Scheme:
    """The scheme `name`, which is not torch's; `ValueError` listing the known ones otherwise."""
    for scheme in _SCHEMES:
        if scheme.name == name:
            return scheme
    raise ValueError(f"no naming scheme is called {name!r}; known: {', '.join(names())}")


def recognise(tensors: Mapping[str, TensorInfo], config: Config | None, usual: str | None = None) -> Scheme:
    """The first scheme whose names `tensors` carry; `usual` for names that could be anybody's."""
    found = next(scheme for scheme in _SCHEMES if scheme.recognises(tensors, config))
    return scheme_called(usual) if usual is not None and found is _SCHEMES[-1] else found
