"""Random bits."""

from __future__ import annotations

from easytorch.backends.dtypes import FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


@takes((DType.UINT64,), "the state of Philox is uint64[3]")
def _rng(state: Shape, shape: Shape) -> tuple[Shape, Shape]:
    wanted = Shape(DType.UINT64, (3,))
    if state != wanted:
        raise BackendError(f"the state of Philox is {wanted}: a key and a counter of two words")
    require_dtype(shape, (*UNSIGNED, *SIGNED, *FLOATS), "random bits are integers, or floats of their size")
    return state, shape


@takes((DType.UINT64,), "the state of ThreeFry is uint64[2]")
def _three_fry(state: Shape, shape: Shape) -> tuple[Shape, Shape]:
    wanted = Shape(DType.UINT64, (2,))
    if state != wanted:
        raise BackendError(f"the state of ThreeFry is {wanted}: a key and a counter")
    require_dtype(shape, (*UNSIGNED, *SIGNED, *FLOATS), "random bits are integers, or floats of their size")
    return state, shape


def halves(shape: Shape) -> tuple[tuple[int, ...], int]:
    """The shape of each of the two words that a ThreeFry step returns, and the axis along which they alternate."""
    sizes = shape.dimensions or (1,)
    axis = next((axis for axis, size in enumerate(sizes) if size % 2 == 0), sizes.index(max(sizes)))
    return (*sizes[:axis], -(-sizes[axis] // 2), *sizes[axis + 1 :]), axis


RULES: dict[OpType, Rule] = {
    OpType.RNG_BIT_GENERATOR: _rng,
    OpType.RNG_BIT_GENERATOR_THREE_FRY: _three_fry,
}
