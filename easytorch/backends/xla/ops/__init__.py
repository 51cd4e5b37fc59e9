"""The emitters of all operations, by family.

Every module has `EMITTERS`: for a kind of operation, the function that writes it. The function takes the emitter, the
operands, and the node's attributes as keywords, and returns one value or a tuple; it accepts every element type that
the rule in shapeinference does. Where XLA's operation differs from what the builder's docstrings say, it is composed of
others here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Emit = Callable[..., Any]
