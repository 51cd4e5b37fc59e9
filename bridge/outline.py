"""The weights of a known architecture without transformers: names and shapes off config.json, by its family's outline.

Building a model on the meta device imports torch and transformers, which takes seconds. An outline
(`bridge/outlines/<model_type>.py`) lists what that would find. It answers for the usual case alone: a config of which
every key and value is known to it, and a checkpoint of just the weights it lists. Everything else, errors included, is
left to `bridge.architecture`, so that an outline decides how soon an answer comes and never which.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from easytorch.bridge.architecture import Architecture, refuse_counts
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.families import Config
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.outlines.fields import COMMON, LABELS, UNKNOWN, Field
from easytorch.bridge.outlines.weights import Weight
from easytorch.bridge.rules import TIED, TIED_ALWAYS, TIED_ENDINGS, Rules, RuleTable

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Head:
    """A class of a family. `base` is the base model's name, "" for the base model itself; `ties` repeat -> source."""

    weights: Callable[[Settings, str], Iterator[Weight]]
    base: str = ""
    ties: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Outline:
    """A family: what its config may say, and the weights of its classes.

    `base` is what its classes call the base model. `fields` are the keys of its config; `fits` says whether their
    values go together. The first of `heads` is what a config without `architectures` describes.
    """

    base: str
    fields: Mapping[str, Field]
    heads: Mapping[str, Head]
    fits: Callable[[Settings], bool]


class OutlinedNames:
    """`HubNames` of an outline: the names on disk are those in memory, and no other spellings are known."""

    fused: frozenset[str] = frozenset()

    def __init__(self, weights: Collection[Weight], ties: Mapping[str, str], always: Mapping[str, str]) -> None:
        self.tensors = {weight.name: weight.shape for weight in weights}
        self.floating = frozenset(self.tensors)
        self.ties = ties
        self._always = always
        self._weights = weights

    def hub_name(self, module_name: str) -> str | None:
        """The name itself, None where it is no weight."""
        return module_name if module_name in self.tensors else None

    def aliases(self, names: Collection[str]) -> dict[str, str]:
        """None: an outline is not used for checkpoints with other names."""
        return {}

    def rules(self) -> Rules:
        """The table by HF Flax's convention (`bridge.convention`)."""
        rows: list[Any] = [(weight.name, weight.leaf, weight.transform) for weight in self._weights]
        paths = {weight.name: weight.leaf for weight in self._weights}
        ties = {**self.ties, **self._always}
        kinds = {repeat: TIED_ALWAYS if repeat in self._always else TIED for repeat in ties}
        return (*rows, *((repeat, paths[source], kinds[repeat]) for repeat, source in ties.items()))


def outline_of(config: Config, tensors: int) -> Architecture | None:
    """The architecture `config` describes, of a checkpoint of that many `tensors`; None where no outline answers."""
    outline = _outlines(config.model_type)
    if outline is None:
        return None
    settings = _settings(outline, config.content)
    name = config.architecture or next(iter(outline.heads))
    if settings is None or name not in outline.heads or not outline.fits(settings):
        return None
    try:
        refuse_counts(config.content, config, tensors)
    except CheckpointError:
        return None
    head = outline.heads[name]
    weights = list(head.weights(settings, f"{head.base}." if head.base else ""))
    tie, ties = settings["tie_word_embeddings"], head.ties or {}
    always = {repeat: source for repeat, source in ties.items() if repeat.endswith(TIED_ENDINGS)}
    names = OutlinedNames(weights, ties if tie else {}, always)
    return Architecture(name, names.tensors, head.base or outline.base, tie, names)


def describes(architecture: Architecture, tensors: Mapping[str, TensorInfo], table: RuleTable, *, leaves: bool) -> bool:
    """Whether `tensors`, torch's or the leaves of a tree, are just the weights of an outlined `architecture`."""
    found = _torch_shapes(tensors, table) if leaves else {name: info.shape for name, info in tensors.items()}
    if found is None or any(architecture.shapes.get(name) != shape for name, shape in found.items()):
        return False
    return architecture.shapes.keys() - found.keys() <= architecture.names.ties.keys()


def _torch_shapes(leaves: Mapping[str, TensorInfo], table: RuleTable) -> dict[str, tuple[int, ...]] | None:
    """What `leaves` are in torch; None where one is in no row of its own or has another rank than its row's."""
    found: dict[str, tuple[int, ...]] = {}
    for path, info in leaves.items():
        match = table.leaf_rule(path)
        if match is None:
            return None
        rule, _, bindings = match
        if len(rule.torch) > 1 or len(rule.leaves) > 1 or rule.transform.rank not in (None, len(info.shape)):
            return None
        found[rule.torch[0].fill(bindings)] = tuple(rule.transform.torch_shapes(info.shape)[0])
    return found if len(found) == len(leaves) else None


def _outlines(model_type: str) -> Outline | None:
    name = f"easytorch.bridge.outlines.{model_type}"
    return importlib.import_module(name).OUTLINE if model_type.isidentifier() and find_spec(name) else None


def _settings(outline: Outline, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings that `content` gives and leaves to their defaults; None where one is not known here."""
    fields = {**COMMON, **outline.fields}
    settings = {key: field.default for key, field in fields.items()}
    for key, value in content.items():
        if key not in fields or not fields[key].accepts(value):
            return None
        settings[key] = value
    if UNKNOWN in settings.values():
        return None
    settings[LABELS] = 2 if settings["id2label"] is None else len(settings["id2label"])
    return settings
