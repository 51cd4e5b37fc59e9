"""The one table of binders; what a backend on torch can do follows from it."""

from __future__ import annotations

from easytorch.backends.interpreter import CONTROL
from easytorch.backends.torch_ops.collectives import COLLECTIVE
from easytorch.backends.torch_ops.elementwise import ELEMENTWISE
from easytorch.backends.torch_ops.indexing import INDEXING
from easytorch.backends.torch_ops.movement import MOVEMENT
from easytorch.backends.torch_ops.normalization import NORMALIZATION
from easytorch.backends.torch_ops.product import PRODUCTS
from easytorch.backends.torch_ops.random import RANDOM
from easytorch.backends.torch_ops.reduction import REDUCTIONS
from easytorch.backends.torch_ops.site import Binder
from easytorch.backends.torch_ops.windows import WINDOWS
from easytorch.backends.types import OpType

BINDERS: dict[OpType, Binder] = {
    **ELEMENTWISE,
    **MOVEMENT,
    **REDUCTIONS,
    **PRODUCTS,
    **INDEXING,
    **WINDOWS,
    **NORMALIZATION,
    **RANDOM,
}
# These are bound with their closures' own functions (lowering.py).
OPERATIONS = frozenset({*CONTROL, *BINDERS, *COLLECTIVE, OpType.SORT, OpType.SELECT_AND_SCATTER})
