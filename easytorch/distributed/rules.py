"""Partition rules: pairs (regular expression, partition spec), which override the sharding that a model declares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from easytorch.distributed.mesh import AXES
from easytorch.distributed.specs import PartitionSpec, axis_names, check_spec

PartitionRules = Mapping[str, Any] | Iterable[tuple[str, Any]]


def specs_by_rules(
    model: nn.Module, rules: PartitionRules | None, axes: Iterable[str] = ()
) -> dict[str, PartitionSpec]:
    """The spec of each parameter that a rule matches; the first rule that does decides.

    A pattern is searched in the name, and in the name with slashes for dots, as EasyDeL's rules are written; a spec is
    a tuple, or None for replicated. axes: of the mesh, beside those of `AXES`. `ValueError` for a rule that matches no
    parameter, names an unknown axis or has more entries than the parameter dimensions.
    """
    if rules is None:
        return {}
    patterns = _patterns(rules)
    used: set[int] = set()
    found: dict[str, PartitionSpec] = {}
    known = dict.fromkeys([*axes, *AXES])
    # a tied weight by each of its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        matching = [
            index
            for index, (pattern, _) in enumerate(patterns)
            if pattern.search(name) or pattern.search(name.replace(".", "/"))
        ]
        used.update(matching)
        if matching:
            pattern, given = patterns[matching[0]]
            found[name] = spec = check_spec(given, parameter.ndim, f"{name}, by the rule {pattern.pattern!r},")
            for axis in (axis for one in spec for axis in axis_names(one)):
                if axis not in known:
                    raise ValueError(
                        f"the partition rule {pattern.pattern!r} names the axis {axis!r}; the axes are "
                        f"{', '.join(known)}"
                    )
    if idle := [pattern.pattern for index, (pattern, _) in enumerate(patterns) if index not in used]:
        names = [name for name, _ in model.named_parameters()]
        raise ValueError(
            f"no parameter matches the partition rule{'s' if len(idle) > 1 else ''} {', '.join(map(repr, idle))}; "
            f"there are {len(names)}, the first is {names[0]!r}"
            if names
            else "the model has no parameters to match"
        )
    return found


def _patterns(rules: PartitionRules) -> list[tuple[re.Pattern[str], Any]]:
    pairs: Iterable[Any] = rules.items() if isinstance(rules, Mapping) else rules
    patterns = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"partition_rules are pairs (pattern, spec), got {pair!r}")
        try:
            patterns.append((re.compile(pair[0]), pair[1]))
        except re.error as error:
            raise ValueError(f"partition_rules: {pair[0]!r} is not a regular expression: {error}") from error
    return patterns
