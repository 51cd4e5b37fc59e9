"""Shape inference and operand checks of every operation, done here before anything is compiled.

`infer` finds the rule of an operation in the tables of the modules here; a rule is a function of the operands' shapes
and of the attributes, under the names of the builder's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference import (
    collectives,
    control,
    conversion,
    elementwise,
    indexing,
    movement,
    normalization,
    product,
    random,
    reduction,
    sorting,
    windows,
)  # fmt: skip
from easytorch.backends.shapeinference.rule import Rule
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

RULES: dict[OpType, Rule] = {
    **elementwise.RULES,
    **conversion.RULES,
    **movement.RULES,
    **reduction.RULES,
    **windows.RULES,
    **product.RULES,
    **normalization.RULES,
    **indexing.RULES,
    **random.RULES,
    **sorting.RULES,
    **control.RULES,
    **collectives.RULES,
}


def accepted_dtypes(op_type: OpType) -> frozenset[DType]:
    """The element types of its first operand (its output, where there is none) for which the operation is defined."""
    return getattr(RULES.get(op_type), "dtypes", frozenset(DType))


def infer(
    op_type: OpType, shapes: Sequence[Shape], attributes: Mapping[str, Any], *, num_devices: int = 1
) -> tuple[Shape, ...]:
    """The shapes of the outputs; `BackendError` naming the operation and the shapes where they do not fit.

    num_devices: how many the computation runs on, which the shapes of collectives depend on.
    """
    rule = RULES.get(op_type)
    if rule is None:
        raise BackendError(f"{op_type.go_name} has no shape rule")
    try:
        found = rule(*shapes, **attributes, **({"num_devices": num_devices} if op_type in collectives.RULES else {}))
    except BackendError as error:
        given = ", ".join(map(str, shapes))
        raise BackendError(f"{op_type.go_name}({given}): {error}") from None
    return found if isinstance(found, tuple) else (found,)
