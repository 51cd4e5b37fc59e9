"""Reductions over axes and over windows, and what scatters back from windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from easytorch.backends.arguments import integer, integers, ints, member, truth
from easytorch.backends.builder_ops.recorder import Closure, Ints, Recorder, or_default, pairs_or_none
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


_FIRST = "the first of several. Padding is never selected; which element is, where one is NaN, is not defined"


class _SelectAndScatterMethod(Protocol):
    def __call__(
        self,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op: ...


def _select_and_scatter(op_type: OpType, selected: str) -> _SelectAndScatterMethod:
    """The method that scatters back from windows; they differ in what a window selects."""

    def select_and_scatter(
        self: ReductionOps,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        return self._add_one(op_type, operand, source, **_windows(window_dimensions, window_strides, paddings))

    select_and_scatter.__name__ = op_type.method
    select_and_scatter.__qualname__ = f"ReductionOps.{op_type.method}"
    select_and_scatter.__doc__ = f"""Adds each element of `source` at the place that its window over `operand` selects:
        {selected}.

        See https://openxla.org/stablehlo/spec#select_and_scatter.
        """
    return select_and_scatter  # type: ignore[return-value]


def _windows(window_dimensions: Ints, window_strides: Ints | None, paddings: Sequence[Ints] | None) -> dict[str, Any]:
    """The attributes of windows that are scattered from; strides are the window's own size, paddings 0 if None."""
    window = integers(window_dimensions, "window_dimensions")
    return {
        "window_dimensions": window,
        "window_strides": window if window_strides is None else integers(window_strides, "window_strides"),
        "paddings": pairs_or_none(paddings, len(window)),
    }


class ReductionOps(Recorder):
    """Without axes a reduction is over all of them."""

    def arg_min_max(self, x: Op, axis: int, output_dtype: Any, is_min: bool) -> Op:
        """The index of the least (or greatest) element along `axis`, which goes; the first of several; NaN wins."""
        return self._add_one(
            OpType.ARG_MIN_MAX,
            x,
            axis=integer(axis, "ArgMinMax: axis"),
            output_dtype=dtype_of(output_dtype),
            is_min=truth(is_min, "ArgMinMax: is_min"),
        )

    def reduce_bitwise_and(self, x: Op, *axes: int | Ints) -> Op:
        """The and of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_AND, x, axes=ints(axes, "axes"))

    def reduce_bitwise_or(self, x: Op, *axes: int | Ints) -> Op:
        """The or of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_OR, x, axes=ints(axes, "axes"))

    def reduce_bitwise_xor(self, x: Op, *axes: int | Ints) -> Op:
        """The exclusive or of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_XOR, x, axes=ints(axes, "axes"))

    def reduce_logical_and(self, x: Op, *axes: int | Ints) -> Op:
        """Whether all are true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_AND, x, axes=ints(axes, "axes"))

    def reduce_logical_or(self, x: Op, *axes: int | Ints) -> Op:
        """Whether any is true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_OR, x, axes=ints(axes, "axes"))

    def reduce_logical_xor(self, x: Op, *axes: int | Ints) -> Op:
        """Whether an odd number is true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_XOR, x, axes=ints(axes, "axes"))

    def reduce_max(self, x: Op, *axes: int | Ints) -> Op:
        """The greatest over `axes`, which go; over all of them if none is given. NaN if one is; of nothing the least of
        the type, -inf where it has one."""
        return self._add_one(OpType.REDUCE_MAX, x, axes=ints(axes, "axes"))

    def reduce_min(self, x: Op, *axes: int | Ints) -> Op:
        """The least over `axes`, which go; over all of them if none is given. NaN if one is; of nothing the greatest of
        the type, inf where it has one."""
        return self._add_one(OpType.REDUCE_MIN, x, axes=ints(axes, "axes"))

    def reduce_product(self, x: Op, *axes: int | Ints) -> Op:
        """The product over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_PRODUCT, x, axes=ints(axes, "axes"))

    def reduce_sum(self, x: Op, *axes: int | Ints) -> Op:
        """The sum over `axes`, which go; over all of them if none is given. Floats narrower than float32 are added in
        float32, here and in windows, products and scatters; integers modulo 2**bits."""
        return self._add_one(OpType.REDUCE_SUM, x, axes=ints(axes, "axes"))

    def reduce_window(
        self,
        x: Op,
        reduction_type: ReduceOpType,
        window_dimensions: Ints,
        strides: Ints | None = None,
        base_dilations: Ints | None = None,
        window_dilations: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        """The reduction of every window; strides are the window's own size, dilations 1 and paddings 0 if None."""
        window = integers(window_dimensions, "ReduceWindow: window_dimensions")
        rank = len(window)
        return self._add_one(
            OpType.REDUCE_WINDOW,
            x,
            reduction_type=member(ReduceOpType, reduction_type, "ReduceWindow: reduction_type"),
            window_dimensions=window,
            strides=window if strides is None else integers(strides, "ReduceWindow: strides"),
            base_dilations=or_default(base_dilations, rank, 1, "base_dilations"),
            window_dilations=or_default(window_dilations, rank, 1, "window_dilations"),
            paddings=pairs_or_none(paddings, rank),
        )

    select_and_scatter_max = _select_and_scatter(OpType.SELECT_AND_SCATTER_MAX, f"the greatest element, {_FIRST}")
    select_and_scatter_min = _select_and_scatter(OpType.SELECT_AND_SCATTER_MIN, f"the least element, {_FIRST}")
    select_and_scatter_sum = _select_and_scatter(OpType.SELECT_AND_SCATTER_SUM, "all of it")

    def select_and_scatter(
        self,
        operand: Op,
        source: Op,
        init_value: Op,
        select: Closure,
        scatter: Closure,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int] | None = None,
        paddings: Sequence[Sequence[int]] | None = None,
    ) -> Op:
        """Each element of `source` put, by `scatter(so far, element)`, at the place its window over `operand` selects.

        What stands there first is the scalar `init_value`. A window's first element is selected, then each for which
        `select(selected, element)` is false; padding never. Both closures are operations on elements of two scalars,
        and capture nothing. In which order several go to one place is not defined.
        """
        shape = Shape(self._shapes([operand])[0].dtype)
        return self._add_one(
            OpType.SELECT_AND_SCATTER,
            operand,
            source,
            init_value,
            select=self._closure(select, (shape, shape), "select"),
            scatter=self._closure(scatter, (shape, shape), "scatter"),
            **_windows(window_dimensions, window_strides, paddings),
        )
