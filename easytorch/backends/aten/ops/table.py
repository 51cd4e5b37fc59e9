"""The one table of binders; what a backend on torch can do follows from it."""

from __future__ import annotations

from easytorch.backends.aten.node_context import Binder
from easytorch.backends.aten.ops.collectives import COLLECTIVE
from easytorch.backends.aten.ops.conversion import CONVERSION
from easytorch.backends.aten.ops.elementwise import ELEMENTWISE
from easytorch.backends.aten.ops.indexing import INDEXING
from easytorch.backends.aten.ops.movement import MOVEMENT
from easytorch.backends.aten.ops.normalization import NORMALIZATION
from easytorch.backends.aten.ops.product import PRODUCT
from easytorch.backends.aten.ops.random import RANDOM
from easytorch.backends.aten.ops.reduction import REDUCTION
from easytorch.backends.aten.ops.windows import WINDOWS
from easytorch.backends.interpreter import CONTROL
from easytorch.backends.types import OpType

BINDERS: dict[OpType, Binder] = {
    **ELEMENTWISE,
    **CONVERSION,
    **MOVEMENT,
    **REDUCTION,
    **PRODUCT,
    **INDEXING,
    **WINDOWS,
    **NORMALIZATION,
    **RANDOM,
}
# These are bound with their closures' own functions (lowering.py).
OPERATIONS = frozenset({*CONTROL, *BINDERS, *COLLECTIVE, OpType.SORT, OpType.SELECT_AND_SCATTER})
