"""Weights that a table names and a checkpoint or tree lacks: a model loaded without them would keep random values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import Any

from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.rules.patterns import Bindings, Pattern
from easytorch.bridge.rules.plan import Plan
from easytorch.bridge.rules.table import SPARE, RuleTable


def refuse_missing(plan: Plan, table: RuleTable, dropped: Collection[str] = ()) -> None:
    """`CheckpointError` where a row of `table` that must have data has none in `plan`.

    A table without variables is one model's, so every row must have data. One with variables may be a family's, with
    the heads and biases of all its models: there a module that has some of its weights must have all that the same
    module has in other layers. Ties, buffers and spare rows may be absent, and so may `dropped`, the names of the
    source (torch's or leaves) that the user left out.
    """
    names = {name for step in plan.steps for name in step.sources} | plan.targets.keys() | plan.tied.keys()
    # Torch's names may be the source's or the target's, in old spellings too.
    known = table.torch_names(sorted(names | plan.kept.keys())).keys()
    rows = [pattern for rule in table.weights if rule.kind != SPARE for pattern in rule.torch]
    absent = _made_of(dropped, table)
    for name in _of_modules(rows, known) if any(row.variables for row in rows) else [row.fill(()) for row in rows]:
        if name not in known and name not in absent and table.tie(name) is None:
            raise CheckpointError(f"is missing, and the rules name it{nearest(name, names)}; add it", tensor=name)


def _made_of(dropped: Collection[str], table: RuleTable) -> set[str]:
    """The torch names of `dropped`, which are torch names or leaves."""
    found = [match for name in dropped for path in _in_collections(name) if (match := table.leaf_rule(path))]
    made = {pattern.fill(bindings) for rule, _, bindings in found for pattern in rule.torch}
    return made | table.torch_names(dropped).keys()


def _in_collections(path: str) -> tuple[str, ...]:
    """The names that a leaf of an nnx module may have in tables, as its file does not tell which are statistics."""
    return path, f"params/{path}", f"batch_stats/{path}"


def _of_modules(rows: list[Pattern], known: Set[str]) -> Iterator[str]:
    """Weights that present modules have in other layers, such as one layer's bias that all others have."""
    modules: dict[tuple[Any, ...], dict[Pattern, set[Bindings]]] = {}
    for row in rows:
        found = {bindings for name in known if (bindings := row.match(name)) is not None}
        modules.setdefault(row.components[:-1], {})[row] = found
    for module in modules.values():
        everywhere = set().union(*module.values())
        for row, found in module.items():
            # Of the same projection: queries may have a bias and outputs none.
            alike = {_without_numbers(bindings) for bindings in found}
            yield from (row.fill(one) for one in sorted(everywhere - found) if _without_numbers(one) in alike)


def _without_numbers(bindings: Bindings) -> Bindings:
    return tuple((name, value) for name, value in bindings if not value.isdecimal())
