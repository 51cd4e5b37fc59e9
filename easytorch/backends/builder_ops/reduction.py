"""Reductions over axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from easytorch.backends.arguments import integer, ints, truth
from easytorch.backends.builder_ops.recorder import Ints, Recorder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ReductionOps(Recorder):
    """A reduction drops the axes it is over; without `axes` it is over all of them, and gives a scalar."""

    def arg_min_max(self, x: Op, axis: int, output_dtype: Any, is_min: bool) -> Op:
        """The index of the minimum (or maximum) along `axis`, dropping it: the first of several; NaN counts as it."""
        return self._add_one(
            OpType.ARG_MIN_MAX,
            x,
            axis=integer(axis, "ArgMinMax: axis"),
            output_dtype=dtype_of(output_dtype),
            is_min=truth(is_min, "ArgMinMax: is_min"),
        )

    def reduce_bitwise_and(self, x: Op, *axes: int | Ints) -> Op:
        """Bitwise and over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_AND, x, axes=ints(axes, "axes"))

    def reduce_bitwise_or(self, x: Op, *axes: int | Ints) -> Op:
        """Bitwise or over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_OR, x, axes=ints(axes, "axes"))

    def reduce_bitwise_xor(self, x: Op, *axes: int | Ints) -> Op:
        """Bitwise exclusive or over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_XOR, x, axes=ints(axes, "axes"))

    def reduce_logical_and(self, x: Op, *axes: int | Ints) -> Op:
        """Whether all elements are true, over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_AND, x, axes=ints(axes, "axes"))

    def reduce_logical_or(self, x: Op, *axes: int | Ints) -> Op:
        """Whether any element is true, over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_OR, x, axes=ints(axes, "axes"))

    def reduce_logical_xor(self, x: Op, *axes: int | Ints) -> Op:
        """Whether an odd number of elements is true, over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_XOR, x, axes=ints(axes, "axes"))

    def reduce_max(self, x: Op, *axes: int | Ints) -> Op:
        """Maximum over `axes`, dropping them; over all axes if none is given. NaN if any element is; of an empty array
        the smallest value of the type, -inf for floats that have it."""
        return self._add_one(OpType.REDUCE_MAX, x, axes=ints(axes, "axes"))

    def reduce_min(self, x: Op, *axes: int | Ints) -> Op:
        """Minimum over `axes`, dropping them; over all axes if none is given. NaN if any element is; of an empty array
        the largest value of the type, inf for floats that have it."""
        return self._add_one(OpType.REDUCE_MIN, x, axes=ints(axes, "axes"))

    def reduce_product(self, x: Op, *axes: int | Ints) -> Op:
        """Product over `axes`, dropping them; over all axes if none is given."""
        return self._add_one(OpType.REDUCE_PRODUCT, x, axes=ints(axes, "axes"))

    def reduce_sum(self, x: Op, *axes: int | Ints) -> Op:
        """Sum over `axes`, dropping them; over all axes if none is given. Floats narrower than float32 are summed
        in float32, here and in windows, products and scatters; integers wrap modulo 2**bits."""
        return self._add_one(OpType.REDUCE_SUM, x, axes=ints(axes, "axes"))
