"""Random bits."""

from __future__ import annotations

from collections.abc import Callable

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.conversion import bitcast, convert

_BY_BITS = {8: DType.UINT8, 16: DType.UINT16, 32: DType.UINT32, 64: DType.UINT64}


def _generator(algorithm: str) -> Callable[..., tuple[Value, Value]]:
    return lambda e, state, shape: _drawn(e, state, shape, algorithm)


def _drawn(e: Emitter, state: Value, shape: Shape, algorithm: str) -> tuple[Value, Value]:
    if not shape.size:
        # XLA's expansion loops over the other axes, whatever their sizes.
        return state, e.full(0, shape)
    four_bits = shape.dtype.bits == 4
    drawn = shape.with_dtype(_BY_BITS[max(shape.dtype.bits, 8)])
    attributes = f"rng_algorithm = #stablehlo<rng_algorithm {algorithm}>"
    after, bits = e.ops("rng_bit_generator", (state,), (state.shape, drawn), attributes)
    return after, (convert if four_bits else bitcast)(e, bits, shape.dtype)


EMITTERS: dict[OpType, Emit] = {
    OpType.RNG_BIT_GENERATOR: _generator("PHILOX"),
    OpType.RNG_BIT_GENERATOR_THREE_FRY: _generator("THREE_FRY"),
}
