"""Every operation in NumPy: the reference that the other backends are tested against.

A function takes the operands as arrays and the attributes under the names of the builder's arguments, and returns an
array, or a tuple for several outputs. Narrow floats are computed in float32 and rounded once, as XLA does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from easytorch.backends.reference.ops.collectives import COLLECTIVE
from easytorch.backends.reference.ops.conversion import CONVERSION
from easytorch.backends.reference.ops.elementwise import ELEMENTWISE
from easytorch.backends.reference.ops.indexing import INDEXING
from easytorch.backends.reference.ops.movement import MOVEMENT
from easytorch.backends.reference.ops.normalization import NORMALIZATION
from easytorch.backends.reference.ops.product import PRODUCT
from easytorch.backends.reference.ops.random import RANDOM
from easytorch.backends.reference.ops.reduction import REDUCTION
from easytorch.backends.reference.ops.sorting import SORTING
from easytorch.backends.reference.ops.windows import WINDOWS
from easytorch.backends.types import OpType


def _arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy returns scalars for 0-d arrays; here everything is an array."""

    def computed(*operands: np.ndarray, **attributes: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        result = function(*operands, **attributes)
        return tuple(map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)

    return computed


_TABLES = (ELEMENTWISE, CONVERSION, MOVEMENT, REDUCTION, WINDOWS, PRODUCT, INDEXING, NORMALIZATION, RANDOM, SORTING)
FUNCTIONS: dict[OpType, Callable[..., Any]] = {
    **{op_type: _arrays(function) for table in _TABLES for op_type, function in table.items()},
    **COLLECTIVE,
}
