"""HF Flax names for any model of transformers: one literal row per tensor, by the types of its modules and its family.

`bridge/names/flax_leaves.py` holds the convention, `bridge/names/tables/<model_type>.py` what a family does
differently. In a composite model (an encoder and a decoder, a vision and a text tower) each submodel follows the table
of its own family.

Mixture of experts: leaves follow the hub names, one per expert (`experts/0/w1/kernel`), not the stacks in memory.
Tied weights: Flax holds them once, under the name of the one they repeat; one that differs is held too.
Buffers: those with data are leaves like parameters; integers that a class computes (index tables, counters) are kept
beside.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.names.architecture import UNBUILDABLE, Architecture
from easytorch.bridge.names.computed_buffers import is_computed
from easytorch.bridge.names.flax_leaves import is_statistic, leaf_of
from easytorch.bridge.names.hub_names import HubNames
from easytorch.bridge.names.native_rules import native_rules
from easytorch.bridge.names.outline import OutlinedNames
from easytorch.bridge.names.submodels import Submodel, submodels_of, table_of_names
from easytorch.bridge.rules.table import (
    ALIAS,
    BUFFER,
    SPARE,
    TIED,
    TIED_ALWAYS,
    TIED_ENDINGS,
    TIES,
    UNREAD,
    Rule,
    Rules,
)
from easytorch.bridge.rules.transforms import Transform

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Obsolete tensors of old checkpoints: rotary tables per layer (before 4.40), fairseq's version numbers.
_ALWAYS_SCRATCH = r"rotary_emb\.inv_freq$|(encoder|decoder)\.version$"

# The leaf of a row, several where torch holds them as one, None for a buffer.
Path = str | tuple[str, ...] | None
Row = tuple[tuple[str, ...], Path, str | Transform]
RowsOf = Callable[[HubNames], Iterator[Row]]


def flax_rules(config: Config, architecture: Architecture) -> Rules:
    """The table of a checkpoint: its native family's `RULES` where there is one, else the convention's."""
    native = native_rules(config.model_type)
    if native is not None:
        return native
    names = architecture.names
    if isinstance(names, OutlinedNames):
        rules = outlined_rules(names, architecture.given)
        assert rules is not None, "an outline answers where it knows all names"
        return rules
    return convention_rules(names, architecture.given)


def outlined_rules(
    names: OutlinedNames, given: Iterable[str], rows_of: Callable[[OutlinedNames], Iterator[Row]] | None = None
) -> Rules | None:
    """`convention_rules` from an outline; None where it does not know all of the names `given`."""
    rows = _Rows(frozenset(given), rows_of or outline_rows, statistics=rows_of is None)
    rows.add(names)
    table, depends = table_of_names(names.model_type)
    if rows.unknown and depends:
        return None
    if rows_of is None:
        rows.add_from_tables([] if table is None else [Submodel("", table, "")])
    for sibling in names.siblings():
        if not rows.unknown:
            break
        if sibling is None:
            return None  # it may have the name
        rows.add(sibling)
    rows.add_scratch((*names.unexpected, _ALWAYS_SCRATCH))
    return None if rows.unknown else rows.rules()


def outline_rows(names: OutlinedNames) -> Iterator[Row]:
    """Every row of one class of an outline."""
    for name, path, kind, _ in names.rows:
        yield (name,), path, kind


def convention_rules(names: HubNames, given: Iterable[str] = (), rows_of: RowsOf | None = None) -> Rules:
    """The table of the model `names` stands for.

    given: the names of the checkpoint, torch's or Flax's. Those the model does not have are looked for in the other
    classes of its family (another head, a pooler), and read as older spellings.
    rows_of: the rows of one class by another convention than HF Flax's.
    """
    rows = _Rows(frozenset(given) - names.fused, rows_of or model_rows, statistics=rows_of is None)
    rows.add(names)
    if rows_of is None:
        rows.add_from_tables(submodels_of(names))
    for model_class in _siblings(type(names.model)):
        if not rows.unknown:
            break
        if (model := _on_meta(model_class, names.model)) is not None:
            rows.add(HubNames(model))
    rows.add_aliases(names)
    rows.add_scratch((*(names.model._keys_to_ignore_on_load_unexpected or ()), _ALWAYS_SCRATCH))
    return rows.rules()


class _Rows:
    """The rows of one or several classes of a family; the first row that names a tensor or a leaf wins."""

    def __init__(self, given: frozenset[str], rows_of: Callable[[Any], Iterator[Row]], *, statistics: bool) -> None:
        """statistics: whether running means are in a collection apart from the parameters."""
        self._given = given
        self._rows_of = rows_of
        self._statistics = statistics
        self._known: set[str] = set()
        self._tied: set[str] = set()
        self._rows: list[Rule] = []
        self._batch_stats = False

    def rules(self) -> Rules:
        return tuple(self._rows)

    @property
    def unknown(self) -> list[str]:
        """The names of the checkpoint that no row has."""
        return sorted(self._given - self._known)

    def add(self, names: HubNames | OutlinedNames) -> None:
        """The rows of one class, and those of a checkpoint of its base model alone or of a head around it."""
        self._batch_stats = self._batch_stats or (self._statistics and any(map(is_statistic, names.tensors)))
        base, others = names.base, list[Row]()
        for row in self._rows_of(names):
            self._add(*row)
            others += _without(base, *row) if names.has_base or not base else _around(base, *row)
        others = [(torch_names, self._headed(torch_names, path), kind) for torch_names, path, kind in others]
        if not self._given or any(not self._given.isdisjoint((*row[0], *_leaves(row[1]))) for row in others):
            for row in others:
                self._append(*row)

    def add_from_tables(self, submodels: list[Submodel]) -> None:
        """Adds rows for leaves that a family's table names and this model lacks: Flax may hold more than torch."""
        for name, submodel in product(self.unknown, submodels):
            if (inside := _inside(name.removeprefix("params/"), submodel.start.replace(".", "/"))) and submodel.table:
                found = submodel.table.flax_rule(inside)
                name = name if found is None else submodel.start + found[0].torch[0].fill(found[1])
            for row in _in_table(name, submodel):
                self._add(*row)

    def add_aliases(self, names: HubNames) -> None:
        """Adds aliases for the checkpoint's names from other versions of transformers."""
        for old, new in names.aliases(self.unknown).items():
            self._rows.append((old, new, ALIAS))
            self._known.add(old)

    def add_scratch(self, patterns: Iterable[str]) -> None:
        """Adds buffers for tensors of the checkpoint that transformers no longer needs, by regular expressions."""
        for name in self.unknown:
            if any(re.search(pattern, name) for pattern in patterns):
                self._append((name,), None, BUFFER)

    def _add(self, torch_names: tuple[str, ...], path: Path, kind: str | Transform) -> None:
        self._append(torch_names, self._headed(torch_names, path), kind)

    def _headed(self, torch_names: tuple[str, ...], path: Path) -> Path:
        if not self._batch_stats:
            return path
        collection = "batch_stats" if any(map(is_statistic, torch_names)) else "params"
        return _changed(path, lambda leaf: f"{collection}/{leaf}")

    def _append(self, torch_names: tuple[str, ...], path: Path, kind: str | Transform) -> None:
        if kind in TIES:
            if torch_names[0] not in self._tied:
                self._tied.add(torch_names[0])
                self._rows.append((torch_names[0], path, kind))
            return
        if kind == UNREAD:
            self._rows.append((torch_names[0], path, kind))
            return
        if self._known.isdisjoint((*torch_names, *_leaves(path))):
            self._rows.append((torch_names[0] if len(torch_names) == 1 else torch_names, path, kind))
            self._known.update(torch_names, _leaves(path))


def _leaves(path: Path) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path or ()


def _changed(path: Path, change: Callable[[str], str]) -> Path:
    return change(path) if isinstance(path, str) else path and tuple(map(change, path))


def _without(base: str, torch_names: tuple[str, ...], path: Path, kind: str | Transform) -> list[Row]:
    """The row for a checkpoint of the base model alone; nothing for a weight outside of it."""
    inside = all(name.startswith(f"{base}.") for name in torch_names)
    if not base or not inside or not all(leaf.startswith(f"{base}/") for leaf in _leaves(path)):
        return []
    shorter = tuple(name.removeprefix(f"{base}.") for name in torch_names)
    return [(shorter, _changed(path, lambda leaf: leaf.removeprefix(f"{base}/")), kind)]


def _around(base: str, torch_names: tuple[str, ...], path: Path, kind: str | Transform) -> list[Row]:
    """A row of a checkpoint that holds a head besides."""
    return [(tuple(f"{base}.{name}" for name in torch_names), _changed(path, lambda leaf: f"{base}/{leaf}"), kind)]


def model_rows(names: HubNames) -> Iterator[Row]:
    """Every row of one class, without prefixes of any kind but its own."""
    from transformers.core_model_loading import dot_natural_key

    modules = dict(names.model.named_modules())
    submodels = submodels_of(names)
    paths: dict[str, Path] = {}
    for name, tensor in names.tensors.items():
        rows = next((rows for submodel in submodels if (rows := _in_table(name, submodel))), [])
        for row in rows or [_by_convention(name, tensor, names, modules, submodels)]:
            if row[2] not in TIES:
                paths[name] = row[1]
            yield row
    always = dict(_always_tied(names, modules))
    for repeat, source in (names.model.all_tied_weights_keys | always).items():
        one, path = names.hub_name(repeat), paths.get(names.hub_name(source) or "")
        if one is not None and path is not None:
            yield (one,), path, TIED_ALWAYS if repeat in always else TIED
    for name in sorted(names.scratch, key=dot_natural_key):  # layer 10 after layer 9
        yield (name,), None, BUFFER


def _by_convention(
    name: str, tensor: torch.Tensor, names: HubNames, modules: Mapping[str, torch.nn.Module], submodels: list[Submodel]
) -> Row:
    if not tensor.dtype.is_floating_point and is_computed(name, tensor):
        return (name,), None, BUFFER
    place = names.places[name]
    owner = modules.get(place.name.rpartition(".")[0]) if place.name in names.state else None
    path, transform = leaf_of(name, owner, tensor.dim())
    inside = [submodel for submodel in submodels if name.startswith(submodel.start)]
    return (name,), inside[-1].with_level(path), transform


def _always_tied(names: HubNames, modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, str]]:
    """The second names of tensors that were tied up to transformers 4.57 regardless of the config.

    All but a head's matrix: its bias, the embeddings of an encoder and a decoder. transformers 5 unties these too.
    """
    from transformers import PreTrainedModel

    for prefix, module in modules.items():
        ties = module._tied_weights_keys if isinstance(module, PreTrainedModel) else None
        for repeat, source in (ties or {}).items():
            one, other = (f"{prefix}.{name}" if prefix else name for name in (repeat, source))
            if repeat.endswith(TIED_ENDINGS) and {one, other} <= names.state.keys():
                yield one, other


def _inside(name: str, start: str) -> str:
    """`name` without `start`, "" where it does not begin with that."""
    return name.removeprefix(start) if name.startswith(start) else ""


def _in_table(name: str, submodel: Submodel) -> list[Row]:
    """The rows the family of `submodel` has for `name`."""
    start, table = submodel.start, submodel.table
    if table is None or not name.startswith(start):
        return []
    inside, path = name.removeprefix(start), start.replace(".", "/")
    if table.is_buffer(inside):
        return [((name,), None, BUFFER)]
    rows: list[Row] = []
    if (match := table.torch_rule(inside)) is not None:
        rule, _, bindings = match
        parts = tuple(start + pattern.fill(bindings) for pattern in rule.torch)
        transform = SPARE if rule.kind == SPARE else rule.transform
        rows.append((parts, path + rule.flax.fill(bindings), transform))
    if (tie := table.tie(inside)) is not None:
        rows.append(((name,), path + tie[1], tie[0].kind))
    return rows


def _siblings(model_class: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    """The other classes with the same config in the same file: other heads, the base model."""
    from transformers import PreTrainedModel

    for _, found in inspect.getmembers(sys.modules[model_class.__module__], inspect.isclass):
        if not issubclass(found, PreTrainedModel) or found.config_class is not model_class.config_class:
            continue
        # The abstract base classes of a family, which have no forward.
        if found is not model_class and found.forward is not PreTrainedModel.forward:
            yield found


def _on_meta(model_class: type[PreTrainedModel], like: PreTrainedModel) -> PreTrainedModel | None:
    """The class with the config of `like`, None where it refuses that."""
    import torch

    try:
        with torch.device("meta"):
            return model_class(like.config)
    except UNBUILDABLE:
        return None
