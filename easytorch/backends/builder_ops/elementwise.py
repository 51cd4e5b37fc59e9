"""The operations on elements: one operand or two, each with the shape of its operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer
from easytorch.backends.builder_ops.recorder import Recorder
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ElementwiseOps(Recorder):
    """Both operands have one dtype and one shape, or one of them is a scalar, or their ranks are equal and an axis of
    size one is repeated."""

    def abs(self, x: Op) -> Op:
        """The absolute value; of a complex number the modulus, which is real."""
        return self._add_one(OpType.ABS, x)

    def ceil(self, x: Op) -> Op:
        """The least integer not below x, in x's dtype."""
        return self._add_one(OpType.CEIL, x)

    def cos(self, x: Op) -> Op:
        return self._add_one(OpType.COS, x)

    def erf(self, x: Op) -> Op:
        """The error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
        return self._add_one(OpType.ERF, x)

    def exp(self, x: Op) -> Op:
        return self._add_one(OpType.EXP, x)

    def expm1(self, x: Op) -> Op:
        """exp(x) - 1, exact near zero."""
        return self._add_one(OpType.EXPM1, x)

    def floor(self, x: Op) -> Op:
        """The greatest integer not above x, in x's dtype."""
        return self._add_one(OpType.FLOOR, x)

    def identity(self, x: Op) -> Op:
        """x itself, as a new operation."""
        return self._add_one(OpType.IDENTITY, x)

    def is_finite(self, x: Op) -> Op:
        """bool: neither infinite nor NaN."""
        return self._add_one(OpType.IS_FINITE, x)

    def log(self, x: Op) -> Op:
        return self._add_one(OpType.LOG, x)

    def log1p(self, x: Op) -> Op:
        """log(1 + x), exact near zero."""
        return self._add_one(OpType.LOG1P, x)

    def logical_not(self, x: Op) -> Op:
        """x must be bool."""
        return self._add_one(OpType.LOGICAL_NOT, x)

    def logistic(self, x: Op) -> Op:
        """1 / (1 + exp(-x))."""
        return self._add_one(OpType.LOGISTIC, x)

    def neg(self, x: Op) -> Op:
        """-x; of unsigned integers modulo 2**bits."""
        return self._add_one(OpType.NEG, x)

    def real(self, x: Op) -> Op:
        """The real part; x itself if it is a float."""
        return self._add_one(OpType.REAL, x)

    def imag(self, x: Op) -> Op:
        """The imaginary part; zeros if x is a float."""
        return self._add_one(OpType.IMAG, x)

    def conj(self, x: Op) -> Op:
        return self._add_one(OpType.CONJ, x)

    def round(self, x: Op) -> Op:
        """The nearest integer in x's dtype, halves to the even one."""
        return self._add_one(OpType.ROUND, x)

    def rsqrt(self, x: Op) -> Op:
        return self._add_one(OpType.RSQRT, x)

    def sign(self, x: Op) -> Op:
        """-1, a zero of x's sign, or 1; NaN of NaN; of complex numbers x / abs(x)."""
        return self._add_one(OpType.SIGN, x)

    def sin(self, x: Op) -> Op:
        return self._add_one(OpType.SIN, x)

    def sqrt(self, x: Op) -> Op:
        return self._add_one(OpType.SQRT, x)

    def tanh(self, x: Op) -> Op:
        return self._add_one(OpType.TANH, x)

    def bitwise_not(self, x: Op) -> Op:
        """x must be an integer or bool."""
        return self._add_one(OpType.BITWISE_NOT, x)

    def bit_count(self, x: Op) -> Op:
        """How many bits are one, in x's own type."""
        return self._add_one(OpType.BIT_COUNT, x)

    def clz(self, x: Op) -> Op:
        """How many of the highest bits are zero, in x's own type."""
        return self._add_one(OpType.CLZ, x)

    def tan(self, x: Op) -> Op:
        return self._add_one(OpType.TAN, x)

    def cbrt(self, x: Op) -> Op:
        """The cube root: of a negative float the negative one, of complex numbers that of the least angle."""
        return self._add_one(OpType.CBRT, x)

    def round_nearest_afz(self, x: Op) -> Op:
        """The nearest integer in x's dtype, halves away from zero."""
        return self._add_one(OpType.ROUND_NEAREST_AFZ, x)

    def reduce_precision(self, x: Op, exponent_bits: int, mantissa_bits: int) -> Op:
        """x rounded to a float of so many bits, halves to the even one: infinite where that overflows, and zero where
        its normal numbers end. Bits beyond those of x's type change nothing."""
        return self._add_one(
            OpType.REDUCE_PRECISION,
            x,
            exponent_bits=integer(exponent_bits, "exponent_bits"),
            mantissa_bits=integer(mantissa_bits, "mantissa_bits"),
        )

    def is_nan(self, x: Op) -> Op:
        """bool: not a number."""
        return self._add_one(OpType.IS_NAN, x)

    def add(self, x0: Op, x1: Op) -> Op:
        """x0 + x1; of bool the logical or."""
        return self._add_one(OpType.ADD, x0, x1)

    def sub(self, x0: Op, x1: Op) -> Op:
        """x0 - x1."""
        return self._add_one(OpType.SUB, x0, x1)

    def mul(self, x0: Op, x1: Op) -> Op:
        """x0 * x1; of bool the logical and."""
        return self._add_one(OpType.MUL, x0, x1)

    def div(self, x0: Op, x1: Op) -> Op:
        """x0 / x1; of integers towards zero, by zero -1, or all bits if unsigned."""
        return self._add_one(OpType.DIV, x0, x1)

    def rem(self, x0: Op, x1: Op) -> Op:
        """The remainder of the division towards zero, with the sign of x0; of integers by zero x0."""
        return self._add_one(OpType.REM, x0, x1)

    def pow(self, x0: Op, x1: Op) -> Op:
        """x0 to the power of x1; of integers modulo 2**bits, and for a negative x1 what division gives: 0, but 1 of 1,
        1 or -1 of -1, and -1 of 0."""
        return self._add_one(OpType.POW, x0, x1)

    def max(self, x0: Op, x1: Op) -> Op:
        """The larger; NaN if either is. Complex numbers go by the real part, then the imaginary one."""
        return self._add_one(OpType.MAX, x0, x1)

    def min(self, x0: Op, x1: Op) -> Op:
        """The smaller; NaN if either is. Complex numbers go by the real part, then the imaginary one."""
        return self._add_one(OpType.MIN, x0, x1)

    def atan2(self, x0: Op, x1: Op) -> Op:
        """The angle of the point (x1, x0) from the first axis; of complex numbers
        -i log((x1 + i x0) / sqrt(x1^2 + x0^2))."""
        return self._add_one(OpType.ATAN2, x0, x1)

    def bitwise_and(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be integers or bool."""
        return self._add_one(OpType.BITWISE_AND, x0, x1)

    def bitwise_or(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be integers or bool."""
        return self._add_one(OpType.BITWISE_OR, x0, x1)

    def bitwise_xor(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be integers or bool."""
        return self._add_one(OpType.BITWISE_XOR, x0, x1)

    def shift_left(self, x0: Op, x1: Op) -> Op:
        """x0 * 2**x1 modulo 2**bits; 0 when x1 is not below the bits."""
        return self._add_one(OpType.SHIFT_LEFT, x0, x1)

    def shift_right_arithmetic(self, x0: Op, x1: Op) -> Op:
        """x0 shifted right by x1 bits, filled up with the highest bit (the sign, also of unsigned integers). An x1
        outside 0 to bits - 1 shifts all of them."""
        return self._add_one(OpType.SHIFT_RIGHT_ARITHMETIC, x0, x1)

    def shift_right_logical(self, x0: Op, x1: Op) -> Op:
        """x0 shifted right by x1 bits, filled up with zeros; 0 when x1 is not below the bits."""
        return self._add_one(OpType.SHIFT_RIGHT_LOGICAL, x0, x1)

    def logical_and(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be bool."""
        return self._add_one(OpType.LOGICAL_AND, x0, x1)

    def logical_or(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be bool."""
        return self._add_one(OpType.LOGICAL_OR, x0, x1)

    def logical_xor(self, x0: Op, x1: Op) -> Op:
        """x0 and x1 must be bool."""
        return self._add_one(OpType.LOGICAL_XOR, x0, x1)

    def complex(self, x0: Op, x1: Op) -> Op:
        """x0 + i x1, of float32 or float64."""
        return self._add_one(OpType.COMPLEX, x0, x1)

    def equal(self, x0: Op, x1: Op) -> Op:
        """bool: x0 == x1; false if either is NaN."""
        return self._add_one(OpType.EQUAL, x0, x1)

    def equal_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 == x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.EQUAL_TOTAL_ORDER, x0, x1)

    def not_equal(self, x0: Op, x1: Op) -> Op:
        """bool: x0 != x1; true if either is NaN."""
        return self._add_one(OpType.NOT_EQUAL, x0, x1)

    def not_equal_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 != x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.NOT_EQUAL_TOTAL_ORDER, x0, x1)

    def less_than(self, x0: Op, x1: Op) -> Op:
        """bool: x0 < x1; false if either is NaN."""
        return self._add_one(OpType.LESS_THAN, x0, x1)

    def less_than_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 < x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.LESS_THAN_TOTAL_ORDER, x0, x1)

    def less_or_equal(self, x0: Op, x1: Op) -> Op:
        """bool: x0 <= x1; false if either is NaN."""
        return self._add_one(OpType.LESS_OR_EQUAL, x0, x1)

    def less_or_equal_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 <= x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.LESS_OR_EQUAL_TOTAL_ORDER, x0, x1)

    def greater_than(self, x0: Op, x1: Op) -> Op:
        """bool: x0 > x1; false if either is NaN."""
        return self._add_one(OpType.GREATER_THAN, x0, x1)

    def greater_than_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 > x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.GREATER_THAN_TOTAL_ORDER, x0, x1)

    def greater_or_equal(self, x0: Op, x1: Op) -> Op:
        """bool: x0 >= x1; false if either is NaN."""
        return self._add_one(OpType.GREATER_OR_EQUAL, x0, x1)

    def greater_or_equal_total_order(self, x0: Op, x1: Op) -> Op:
        """bool: x0 >= x1 in the order -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN."""
        return self._add_one(OpType.GREATER_OR_EQUAL_TOTAL_ORDER, x0, x1)

    def clamp(self, min: Op, x: Op, max: Op) -> Op:
        """x, no less than min and no more than max, which are scalars or of x's shape."""
        return self._add_one(OpType.CLAMP, min, x, max)

    def where(self, condition: Op, on_true: Op, on_false: Op) -> Op:
        """on_true where the bool condition holds, on_false elsewhere; a scalar stands for an array of its value."""
        return self._add_one(OpType.WHERE, condition, on_true, on_false)
