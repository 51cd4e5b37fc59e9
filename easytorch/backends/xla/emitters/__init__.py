"""How each operation is written, by family.

Every module has `EMITTERS`: for a kind of operation, the function that writes it and the element types of the first
operand for which it does. The function is given the emitter, the operands, and the node's attributes as keywords, and
returns one value or a tuple of them. What XLA means by an operation differs from what the builder's docstrings say in
places: then it is composed of others here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType

BOOL = (DType.BOOL,)
INTEGERS = (*SIGNED, *UNSIGNED)
NUMBERS = (*INTEGERS, *FLOATS, *COMPLEX)
ORDERED = (*INTEGERS, *FLOATS, *BOOL)
FLOATING = (*FLOATS, *COMPLEX)
BITS = (*INTEGERS, *BOOL)
ALL = tuple(DType)


class Rule(NamedTuple):
    """How an operation is written, and for which element types of its first operand."""

    emit: Callable[..., Any]
    dtypes: frozenset[DType]


def rule(emit: Callable[..., Any], *dtypes: DType) -> Rule:
    """`emit` for the element types."""
    return Rule(emit, frozenset(dtypes))
