"""Conversions to another element type, by value and by bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from easytorch.backends.builder_ops.recorder import Recorder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ConversionOps(Recorder):
    """The result has the shape of the operand, but for bits read as a type of another size."""

    def convert_dtype(self, x: Op, dtype: Any) -> Op:
        """x as `dtype`: floats to integers towards zero and clamped, NaN to 0; anything but zero is true. Of complex
        numbers the real part alone counts, for bool too."""
        return self._add_one(OpType.CONVERT_DTYPE, x, dtype=dtype_of(dtype))

    def bitcast(self, x: Op, target_dtype: Any) -> Op:
        """The bits of x read as another type, the lowest first: a wider type takes up the last axis, a narrower adds
        one. A bool is one bit: eight of them are a byte."""
        return self._add_one(OpType.BITCAST, x, target_dtype=dtype_of(target_dtype))
