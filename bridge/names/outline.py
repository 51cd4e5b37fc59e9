"""The weights of a known architecture without transformers: names and shapes from config.json, by an outline.

Building a model on the meta device imports torch and transformers, which takes seconds. An outline
(`bridge/names/outlines/<model_type>.json`) lists what that would find. It is used only if it knows every key and value
of the config and every name of the checkpoint. Everything else is left to `bridge.names.architecture`, so that an
outline changes the speed and never the result.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture, refuse_counts
from easytorch.bridge.names.outlines.fields import COMMON, KINDS, LABELS, Field, rotary
from easytorch.bridge.names.outlines.language import Settings, holds, value_of
from easytorch.bridge.rules.table import BUFFER, TIES

_LOOPS = "ijk"
_OUTLINES = Path(__file__).with_name("outlines")
# A row of the convention's table: torch's name, the leaf, the transform, and the required shape, if any.
Row = tuple[str, str | None, str, tuple[int, ...] | None]


class Unsure(Exception):
    """An outline cannot be used: the sizes in the config are inconsistent."""


@dataclass(frozen=True)
class Outline:
    """A family's file. `classes` hold their rows, templates with counts; `fits` what values go together.

    `labels` is how many a classifier has where the config does not say.
    """

    model_type: str
    default: str
    labels: int
    fields: Mapping[str, Field]
    made: Mapping[str, str]
    same: Mapping[str, str]
    fits: tuple[str, ...]
    classes: Mapping[str, Mapping[str, Any]]

    def settings(self, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """The settings in `content`, with defaults for absent ones; None where one is not known here."""
        settings = {key: field.default for key, field in self.fields.items()}
        given = dict(_flat(content, *_places(self.fields)))
        for key, value in given.items():
            if key in self.same and key not in self.fields:
                if self.same[key] not in given or repr(given[self.same[key]]) != repr(value):
                    return None
                continue
            if key not in self.fields or not self.fields[key].accepts(value):
                return None
            settings[key] = value
        settings[LABELS] = self.labels if settings["id2label"] is None else len(settings["id2label"])
        for key, expression in self.made.items():
            if settings[key] is None:
                settings[key] = value_of(expression, settings)
                if settings[key] is None:
                    return None
        return settings if all(_fits(condition, settings) for condition in self.fits) else None

    def architecture(self, config: Config, name: str, given: Collection[str] = ()) -> Architecture | None:
        """The architecture of the class `name` for `config`; None where the outline does not determine it."""
        described = self.classes.get(name)
        settings = self.settings(config.content)
        if settings is None or described is None or not all(holds(one, settings) for one in described.get("where", ())):
            return None
        try:
            names = OutlinedNames(self, name, settings)
        except Unsure:
            return None
        # "always": the config class sets it whatever config.json says
        said = described["tie"] == "always" or (described["tie"] and bool(settings["tie_word_embeddings"]))
        tie = bool(names.ties) or said
        return Architecture(name, names.shapes, names.base, tie, names, given)

    def rows(self, name: str, settings: Settings) -> list[Row]:
        """The rows of a class; `Unsure` where a size is none."""
        return [_filled(row, settings, indexes) for row, indexes in _expanded(self._templates(name), settings, {}, 0)]

    def ties(self, name: str, settings: Settings) -> dict[str, str]:
        """The ties of a class: a weight -> the one it repeats."""
        rows = [(repeat, source, "", None, *when) for repeat, source, *when in self.classes[name]["ties"]]
        return {
            _numbered(row[0], indexes): _numbered(row[1], indexes) for row, indexes in _expanded(rows, settings, {}, 0)
        }

    def _templates(self, name: str) -> list[Any]:
        found: list[Any] = []
        for row in self.classes[name]["rows"]:
            if "all of" not in row:
                found.append(row)
                continue
            start, without = row.get("below", ""), row.get("without", ())
            found += [
                [start + one[0], _below(start, one[1]), *one[2:]]
                for one in self._templates(row["all of"])
                if one[0] not in without
            ]
        return found


class OutlinedNames:
    """`HubNames` of an outline's class: the names on disk are those in memory, and no other spellings are known."""

    fused: frozenset[str] = frozenset()

    def __init__(self, outline: Outline, name: str, settings: Settings) -> None:
        described = outline.classes[name]
        self.model_type = outline.model_type
        self.base: str = described["base"]
        self.has_base: bool = described["inside"]
        self.rows = outline.rows(name, settings)
        self.ties = outline.ties(name, settings)
        self.unexpected: tuple[str, ...] = tuple(described.get("unexpected", ()))
        self.tensors = {
            name: shape for name, _, kind, shape in self.rows if shape is not None or kind not in (BUFFER, *TIES)
        }
        # No shape for tensors that transformers recomputes where a checkpoint lacks them; an empty one for buffers.
        buffers = {name for name, _, kind, shape in self.rows if kind == BUFFER and shape == ()}
        self.shapes = {name: shape for name, shape in self.tensors.items() if shape is not None and name not in buffers}
        self._outline, self._name, self._settings = outline, name, settings

    @property
    def floating(self) -> Collection[str]:
        """The names on disk of the model's floating point tensors: integer buffers have no shape here."""
        return self.tensors.keys()

    def hub_name(self, module_name: str) -> str | None:
        """The name itself, None where it is no weight."""
        return module_name if module_name in self.tensors else None

    def aliases(self, names: Collection[str]) -> dict[str, str]:
        """None: an outline is not used for checkpoints with other spellings."""
        return {}

    def siblings(self) -> Iterator[OutlinedNames | None]:
        """The names of the family's other classes, None for one that the outline does not cover."""
        for name, described in self._outline.classes.items():
            if name == self._name:
                continue
            if described is None or not all(holds(one, self._settings) for one in described.get("where", ())):
                yield None
                continue
            try:
                yield OutlinedNames(self._outline, name, self._settings)
            except Unsure:
                yield None


def outline_of(config: Config, tensors: int, given: Collection[str] = ()) -> Architecture | None:
    """The architecture `config` describes, of a checkpoint of that many `tensors`; None where no outline answers."""
    outline = read_outline(config.model_type)
    if outline is None:
        return None
    name = config.architecture or outline.default
    # No config can ask for a class that transformers keeps to itself.
    if not (outline.classes.get(name) or {}).get("public", True):
        return None
    try:
        refuse_counts(config.content, config, tensors)
    except CheckpointError:
        return None
    return outline.architecture(config, name, given)


@cache
def read_outline(model_type: str) -> Outline | None:
    """The outline of a family, None where there is none."""
    file = _OUTLINES / f"{model_type}.json"
    # A config may call its family by a path.
    if file.parent != _OUTLINES or not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    parts, _ = _places(found["keys"])
    fields = {(f"{part}." if part else "") + key: field for part in parts for key, field in COMMON.items()}
    for key, (kind, default, *values) in found["keys"].items():
        if kind == "rotary":
            fields |= rotary(key.removesuffix("rope_parameters"), *values)
        else:
            fields[key] = KINDS[kind](default, *values)
    return Outline(
        model_type,
        found["default"],
        found["labels"],
        fields,
        found["made"],
        found["same"],
        tuple(found["fits"]),
        found["classes"],
    )


def _places(keys: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a config's parts, "" of the config itself, and of its lists: `depths.length` says there is one."""
    lists = frozenset(key.removesuffix(".length") for key in keys if key.endswith(".length"))
    return frozenset(key.rpartition(".")[0] for key in keys) - lists, lists


def _flat(
    content: Mapping[str, Any], parts: Collection[str], lists: Collection[str], start: str = ""
) -> Iterator[tuple[str, Any]]:
    """A config's keys, those of its parts and lists with dots: `text_config.size`, `depths.0`, `depths.length`."""
    for key, value in content.items():
        name = start + key
        if name in parts and type(value) is dict:
            yield from _flat(value, parts, lists, f"{name}.")
        elif name in lists and type(value) is list:
            yield f"{name}.length", len(value)
            yield from ((f"{name}.{place}", one) for place, one in enumerate(value))
        else:
            yield name, value


def _fits(condition: str, settings: Settings) -> bool:
    """Whether the condition holds: `size%heads` has no remainder, `token<size`, or `types#layers` has that length.

    A key whose value is None satisfies it.
    """
    if "#" in condition:
        listed, count = (settings[key] for key in condition.split("#"))
        return listed is None or count == sum(1 if type(one) is str else len(one[0]) * one[1] for one in listed)
    if "%" in condition:
        one, other = (int(key) if key.isdecimal() else settings[key] for key in condition.split("%"))
        return one is None or other is None or (other > 0 and one % other == 0)
    one, other = (settings[key] for key in condition.split("<"))
    return one is None or other is None or one < other


def _expanded(
    rows: Collection[Any], settings: Settings, indexes: Mapping[str, int], depth: int
) -> Iterator[tuple[Any, Mapping[str, int]]]:
    """Each row with its loop indices: the rows of a loop are repeated together, index by index."""
    for loop, inside in groupby(rows, lambda row: _loop(row[0], depth)):
        if loop is None:
            here = {**settings, **indexes}
            yield from ((row, indexes) for row in inside if all(holds(one, here) for one in row[4:]))
            continue
        count = value_of(loop[1], settings)
        if count is None:
            raise Unsure(loop)
        body = list(inside)
        for number in range(count):
            yield from _expanded(body, settings, {**indexes, _LOOPS[depth]: number}, depth + 1)


def _loop(template: str, depth: int) -> tuple[str, str] | None:
    """(text before, expression) of a template's count number `depth`; None where there are fewer."""
    parts = template.split("{")
    return ("{".join(parts[: depth + 1]), parts[depth + 1].partition("}")[0]) if len(parts) > depth + 1 else None


def _numbered(template: str, indexes: Mapping[str, int]) -> str:
    """`template` with loop indices in place of its counts."""
    first, *others = template.split("{")
    numbers = zip(indexes.values(), others, strict=True)
    return first + "".join(f"{number}{other.partition('}')[2]}" for number, other in numbers)


def _below(start: str, leaf: str | None) -> str | None:
    return start.replace(".", "/") + leaf if leaf is not None and "/" in leaf else leaf


def _filled(row: Any, settings: Settings, indexes: Mapping[str, int]) -> Row:
    template, leaf, kind, sizes, *_ = row
    name = _numbered(template, indexes)
    path = leaf
    if leaf is not None:
        path = _numbered(leaf, indexes) if "/" in leaf else "/".join((*name.split(".")[:-1], leaf))
    if sizes is None:
        return name, path, kind, None
    shape = tuple(value_of(size, settings) for size in sizes)
    if None in shape:
        raise Unsure(name)
    return name, path, kind, shape  # type: ignore[return-value]
