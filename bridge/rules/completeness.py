"""Weights that a table names and a checkpoint or a tree has not: a model loaded without them computes with noise."""

from __future__ import annotations

from collections.abc import Iterator, Set

from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.rules.patterns import Bindings, Pattern
from easytorch.bridge.rules.plan import Plan
from easytorch.bridge.rules.table import SPARE, RuleTable


def refuse_missing(plan: Plan, table: RuleTable) -> None:
    """`CheckpointError` where a row of `table` that must have data has none in `plan`.

    A table without variables is one model's, and every row of it must. One with variables may be a family's, which
    lists the heads and biases of all its models: there a module that has some of its weights must have all that the
    same module has in other layers. Ties, buffers and spare rows may be absent.
    """
    names = {name for step in plan.steps for name in step.sources} | plan.targets.keys() | plan.tied.keys()
    # Torch's names are on one side or the other, old spellings among them.
    known = table.torch_names(sorted(names | plan.kept.keys())).keys()
    rows = [pattern for rule in table.weights if rule.kind != SPARE for pattern in rule.torch]
    for name in _of_modules(rows, known) if any(row.variables for row in rows) else [row.fill(()) for row in rows]:
        if name not in known and table.tie(name) is None:
            raise CheckpointError(f"is missing, and the rules name it{nearest(name, names)}; add it", tensor=name)


def _of_modules(rows: list[Pattern], known: Set[str]) -> Iterator[str]:
    """What the modules that are there have in other layers: one layer without the bias that all others have."""
    modules: dict[tuple, dict[Pattern, set[Bindings]]] = {}
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
