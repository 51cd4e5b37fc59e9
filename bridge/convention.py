"""HF Flax names for any model of transformers: one literal row a tensor, by the kinds of its modules and its family.

`bridge/flax_leaves.py` holds the convention, `bridge/tables/<model_type>.py` what a family does differently. In a
composite model (an encoder and a decoder, a vision and a text tower) each member follows the table of its own family.

Mixture of experts: the leaves are those of the hub names, one an expert (`experts/0/w1/kernel`), not memory's stacks.
Tied weights: Flax holds them once, under the name of the one they repeat; one that differs is held too.
Buffers: floating point ones are leaves like parameters, integer ones (index tables, counters) are kept beside.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from easytorch.bridge.architecture import Architecture
from easytorch.bridge.families import Config, native_rules
from easytorch.bridge.flax_leaves import is_statistic, leaf_of
from easytorch.bridge.hub_names import HubNames
from easytorch.bridge.rules import ALIAS, BUFFER, TIED, TIED_IN_TORCH, Rule, Rules, RuleTable, compile_rules
from easytorch.bridge.transforms import Transform

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Rotary tables: transformers keeps one a model, checkpoints from before 4.40 one a layer.
_ALWAYS_SCRATCH = re.compile(r"rotary_emb\.inv_freq$")


def flax_rules(config: Config, architecture: Architecture) -> Rules:
    """The table of a checkpoint: its native family's `RULES` where there is one, else what the convention says."""
    native = native_rules(config.model_type)
    return convention_rules(architecture.names, architecture.given) if native is None else native


def convention_rules(names: HubNames, given: Iterable[str] = ()) -> Rules:
    """The table of the model `names` stands for.

    given: the names of the checkpoint, torch's or Flax's. Those the model does not have are looked for in the other
    classes of its family (another head, a pooler), and read as older spellings.
    """
    rows = _Rows()
    rows.add(names)
    unknown = set(given) - rows.known
    for model_class in _siblings(type(names.model)) if unknown else ():
        unknown -= rows.known
        if not unknown:
            break
        rows.add(HubNames(_on_meta(model_class, names.model)))
    unknown -= rows.known
    ignored = [*(names.model._keys_to_ignore_on_load_unexpected or ()), _ALWAYS_SCRATCH.pattern]
    rows.aliases(names.aliases(unknown))
    rows.scratch(name for name in unknown - rows.known if any(re.search(pattern, name) for pattern in ignored))
    return rows.rules()


class _Rows:
    """The rows of one or several classes of a family; the first to name a tensor or a leaf decides."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._tied: set[str] = set()
        self._rows: list[Rule] = []
        self._batch_stats = False

    def rules(self) -> Rules:
        return tuple(self._rows)

    def add(self, names: HubNames) -> None:
        self._batch_stats = self._batch_stats or any(map(is_statistic, names.tensors))
        base = names.model.base_model_prefix
        is_base = bool(base) and not hasattr(names.model, base)
        for torch_names, path, kind in _model_rows(names):
            self._add(torch_names, path, kind)
            shorter = _without(base, torch_names, path)
            if shorter is not None:
                self._add(*shorter, kind)
            elif is_base:
                longer = None if path is None else f"{base}/{path}"
                self._add(tuple(f"{base}.{name}" for name in torch_names), longer, kind)

    def aliases(self, aliases: dict[str, str]) -> None:
        for old, new in aliases.items():
            self._rows.append((old, new, ALIAS))
            self.known.add(old)

    def scratch(self, names: Iterable[str]) -> None:
        for name in names:
            self._add((name,), None, BUFFER)

    def _add(self, torch_names: tuple[str, ...], path: str | None, kind: str | Transform) -> None:
        if path is not None and self._batch_stats:
            statistic = any(map(is_statistic, torch_names))
            path = f"{'batch_stats' if statistic else 'params'}/{path}"
        if kind in (TIED, TIED_IN_TORCH):
            if torch_names[0] not in self._tied:
                self._tied.add(torch_names[0])
                self._rows.append((torch_names[0], path, kind))
            return
        if self.known.isdisjoint((*torch_names, path)):
            self._rows.append((torch_names[0] if len(torch_names) == 1 else torch_names, path, kind))
            self.known.update(torch_names)
            if path is not None:
                self.known.add(path)


def _without(base: str, torch_names: tuple[str, ...], path: str | None) -> tuple[tuple[str, ...], str | None] | None:
    """A row of a checkpoint that holds the base model alone; None for what stands outside of it."""
    inside = all(name.startswith(f"{base}.") for name in torch_names) and (path or f"{base}/").startswith(f"{base}/")
    if not base or not inside:
        return None
    shorter = tuple(name.removeprefix(f"{base}.") for name in torch_names)
    return shorter, None if path is None else path.removeprefix(f"{base}/")


Row = tuple[tuple[str, ...], str | None, str | Transform]


def _model_rows(names: HubNames) -> Iterator[Row]:
    """Every row of one class, without prefixes of any kind but its own."""
    modules = dict(names.model.named_modules())
    members = _members(modules)
    weights: dict[str, str | None] = {}
    for name, tensor in names.tensors.items():
        found = next((rows for prefix, table in members if (rows := _in_table(name, prefix, table))), None)
        if found is None:
            found = [_by_convention(name, tensor, names, modules)]
            weights[name] = found[0][1]
        yield from found
    for repeat, source in names.model.all_tied_weights_keys.items():
        one, other = names.hub_name(repeat), names.hub_name(source)
        path = weights.get(other or "")
        if one in weights and path is not None:
            yield (one,), path, TIED
    for name in sorted(names.scratch):
        yield (name,), None, BUFFER


def _by_convention(name: str, tensor: torch.Tensor, names: HubNames, modules: Mapping[str, torch.nn.Module]) -> Row:
    if not tensor.dtype.is_floating_point:
        return (name,), None, BUFFER
    place = names.places[name]
    owner = modules.get(place.name.rpartition(".")[0]) if place.name in names.state else None
    return (name,), *leaf_of(name, owner, tensor.dim())


def _in_table(name: str, prefix: str, table: RuleTable) -> list[Row]:
    """The rows a member's family has for `name`; `prefix` is where the member stands in the model."""
    start = f"{prefix}." if prefix else ""
    if not name.startswith(start):
        return []
    inside, path = name.removeprefix(start), start.replace(".", "/")
    if table.is_buffer(inside):
        return [((name,), None, BUFFER)]
    rows: list[Row] = []
    if (match := table.torch_rule(inside)) is not None:
        rule, _, bindings = match
        assert rule.transform is not None
        parts = tuple(start + side.fill(bindings) for side in rule.torch)
        rows.append((parts, path + rule.flax.fill(bindings), rule.transform))
    if (tie := table.tie(inside)) is not None:
        rows.append(((name,), path + tie[1], tie[0].kind))
    return rows


def _members(modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, RuleTable]]:
    """Where the members of families with a table stand; a part of one is no member of its own."""
    found: list[tuple[str, RuleTable]] = []
    for prefix, module in modules.items():
        table = _table_of(module)
        inside = any(other is table and f"{prefix}.".startswith(f"{outer}." if outer else "") for outer, other in found)
        if table is not None and not inside:
            found.append((prefix, table))
    return found


def _table_of(module: torch.nn.Module) -> RuleTable | None:
    from transformers import PreTrainedModel

    return _table(module.config.model_type) if isinstance(module, PreTrainedModel) else None


@cache
def _table(model_type: str) -> RuleTable | None:
    """The compiled table of a native family, the differences of another, None for one that has none."""
    if not model_type:
        return None
    name = f"easytorch.bridge.tables.{model_type.replace('-', '_')}"
    rules = importlib.import_module(name).RULES if find_spec(name) is not None else native_rules(model_type)
    return None if rules is None else compile_rules(rules)


def _siblings(model_class: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    """The other classes with the same config in the same file: other heads, the base model."""
    from transformers import PreTrainedModel

    for _, found in inspect.getmembers(sys.modules[model_class.__module__], inspect.isclass):
        same = issubclass(found, PreTrainedModel) and found.config_class is model_class.config_class
        if same and found is not model_class and not found.__name__.endswith("PreTrainedModel"):
            yield found


def _on_meta(model_class: type[PreTrainedModel], like: PreTrainedModel) -> PreTrainedModel:
    import torch

    with torch.device("meta"):
        return model_class(like.config)
