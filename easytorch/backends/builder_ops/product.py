"""Products: dot, convolution, Fourier transforms, triangular systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, integers, member, truth
from easytorch.backends.builder_ops.recorder import Ints, Recorder, or_default, pairs_or_none
from easytorch.backends.errors import BackendError
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ProductOps(Recorder):
    """Axes are named on both sides; what is None is 1, or no padding."""

    def dot(self, x0: Op, x1: Op) -> Op:
        """Vectors, matrix and vector, or matrices: the last axis of x0 against the first of x1."""
        return self._add_one(OpType.DOT, x0, x1)

    def dot_general(
        self,
        lhs: Op,
        lhs_contracting_axes: Ints,
        lhs_batch_axes: Ints,
        rhs: Op,
        rhs_contracting_axes: Ints,
        rhs_batch_axes: Ints,
    ) -> Op:
        """Sums over the contracting axes; the output has the batch axes, the rest of lhs, the rest of rhs."""
        return self._add_one(
            OpType.DOT_GENERAL,
            lhs,
            rhs,
            lhs_contracting_axes=integers(lhs_contracting_axes, "lhs_contracting_axes"),
            lhs_batch_axes=integers(lhs_batch_axes, "lhs_batch_axes"),
            rhs_contracting_axes=integers(rhs_contracting_axes, "rhs_contracting_axes"),
            rhs_batch_axes=integers(rhs_batch_axes, "rhs_batch_axes"),
        )

    def conv_general_dilated(
        self,
        operand: Op,
        filter: Op,
        axes: ConvolveAxesConfig,
        strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
        input_dilation: Ints | None = None,
        filter_dilation: Ints | None = None,
        filter_group_count: int = 1,
        batch_group_count: int = 1,
    ) -> Op:
        """A convolution, without turning the filter round, over any number of axes; None is 1, or no padding."""
        if not isinstance(axes, ConvolveAxesConfig):
            raise BackendError(f"ConvGeneralDilated: axes must be a ConvolveAxesConfig, and {axes!r} was given")
        spatial = len(axes.input_spatial)
        return self._add_one(
            OpType.CONV_GENERAL_DILATED,
            operand,
            filter,
            axes=axes,
            strides=or_default(strides, spatial, 1, "strides"),
            paddings=pairs_or_none(paddings, spatial),
            input_dilation=or_default(input_dilation, spatial, 1, "input_dilation"),
            filter_dilation=or_default(filter_dilation, spatial, 1, "filter_dilation"),
            filter_group_count=integer(filter_group_count, "ConvGeneralDilated: filter_group_count"),
            batch_group_count=integer(batch_group_count, "ConvGeneralDilated: batch_group_count"),
        )

    def fft(self, operand: Op, fft_type: FFTType, fft_length: Ints) -> Op:
        """The discrete Fourier transform over the last axes, one for each entry of `fft_length`."""
        return self._add_one(
            OpType.FFT,
            operand,
            fft_type=member(FFTType, fft_type, "FFT: fft_type"),
            fft_length=integers(fft_length, "fft_length"),
        )

    def triangular_solve(
        self, a: Op, b: Op, left_side: bool, lower: bool, unit_diagonal: bool = False, adjoint: bool = False
    ) -> Op:
        """x with a x = b, or x a = b if not `left_side`, of matrices in the last two axes, batch axes before them.

        a (..., n, n): only its lower or upper triangle is read, and not its diagonal if that is all ones. adjoint: of
        its conjugate transpose.
        """
        return self._add_one(
            OpType.TRIANGULAR_SOLVE,
            a,
            b,
            left_side=truth(left_side, "left_side"),
            lower=truth(lower, "lower"),
            unit_diagonal=truth(unit_diagonal, "unit_diagonal"),
            adjoint=truth(adjoint, "adjoint"),
        )
