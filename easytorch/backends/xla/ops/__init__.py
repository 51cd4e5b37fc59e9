"""How each operation is written, by family.

Every module has `EMITTERS`: for a kind of operation, the function that writes it. The function is given the emitter,
the operands, and the node's attributes as keywords, and returns one value or a tuple of them; it takes every element
type that the rule of shapeinference does. What XLA means by an operation differs from what the builder's docstrings
say in places: then it is composed of others here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Emit = Callable[..., Any]
