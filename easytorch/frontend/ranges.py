"""The sizes a graph was captured for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram

from easytorch.frontend.errors import LoweringError


def check_sizes(program: ExportedProgram, arguments: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Of each argument its name, its fake tensor and what was given. `LoweringError` for a size out of its range, and
    for two that must be the same and are not."""
    known: dict[Any, tuple[int, str]] = {}
    derived: list[tuple[Any, int, str]] = []
    for name, value, given in arguments:
        for axis, (size, number) in enumerate(zip(value.shape, given.shape, strict=True)):
            if not isinstance(size, torch.SymInt):
                continue
            expression, place = size.node.expr, f"axis {axis} of {name!r}"
            if not expression.is_Symbol:
                derived.append((expression, number, place))
                continue
            other, where = known.setdefault(expression, (number, place))
            if other != number:
                raise LoweringError(f"{place} is {number} and {where} is {other}; they must be the same")
            limits = program.range_constraints.get(expression)
            if limits is not None and not limits.lower <= number <= limits.upper:
                raise LoweringError(
                    f"{place} is {number}; the module was captured for {limits.lower} to {limits.upper}"
                )
    for expression, number, place in derived:
        wanted = expression.xreplace({symbol: size for symbol, (size, _) in known.items()})
        if wanted.is_number and int(wanted) != number:
            raise LoweringError(f"{place} is {number}; by the other sizes it must be {wanted}")
