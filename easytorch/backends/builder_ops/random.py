"""Random bits from explicit state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.backends.builder_ops.recorder import Recorder
from easytorch.backends.shapes import Shape, shape_of
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class RandomOps(Recorder):
    """Each gives the next state beside the bits."""

    def rng_bit_generator(self, state: Op, shape: Shape) -> tuple[Op, Op]:
        """The next state, and random bits of `shape`, by Philox 4x32-10 (Salmon et al. 2011), as XLA's.

        state: uint64[3], the key and the 128-bit counter, its low half first; each block of four words adds one to it.
        Elements of 64 bits take two words, the lower first, narrower ones the low bits of a word each. The bits are the
        same on every backend.
        """
        new_state, values = self._add(OpType.RNG_BIT_GENERATOR, state, shape=shape_of(shape, "RngBitGenerator: shape"))
        return new_state, values

    def rng_bit_generator_three_fry(self, state: Op, shape: Shape) -> tuple[Op, Op]:
        """The next state, and random bits of `shape`, by ThreeFry 2x32-20 (Salmon et al. 2011), as XLA's.

        state: uint64[2], the key and the counter. Each step gives two words: neighbours along the first axis of
        even size, or the longest, one of which is left out at the end of an odd one; of 64 bits one element.
        """
        given = shape_of(shape, "RngBitGeneratorThreeFry: shape")
        new_state, values = self._add(OpType.RNG_BIT_GENERATOR_THREE_FRY, state, shape=given)
        return new_state, values
