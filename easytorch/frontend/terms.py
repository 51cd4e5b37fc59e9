"""`Term`: an op of a builder with Python's operators, for formulas longer than a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op


@dataclass(frozen=True, eq=False)
class Term:
    """`op` of `builder`. Numbers beside it take its type; comparisons give conditions, for `where`."""

    builder: Builder
    op: Op

    def of(self, value: Term | float) -> Op:
        """`value` as an op of this one's type."""
        if isinstance(value, Term):
            return value.op
        return self.builder.constant(np.array(value, self.op.shape.dtype.numpy))

    def number(self, value: float) -> Term:
        """`value` without axes, which any operation repeats."""
        return Term(self.builder, self.of(value))

    def __add__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.add(self.op, self.of(other)))

    def __radd__(self, other: float) -> Term:
        return self + other

    def __sub__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.sub(self.op, self.of(other)))

    def __rsub__(self, other: float) -> Term:
        return Term(self.builder, self.builder.sub(self.of(other), self.op))

    def __mul__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.mul(self.op, self.of(other)))

    def __rmul__(self, other: float) -> Term:
        return self * other

    def __truediv__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.div(self.op, self.of(other)))

    def __rtruediv__(self, other: float) -> Term:
        return Term(self.builder, self.builder.div(self.of(other), self.op))

    def __neg__(self) -> Term:
        return Term(self.builder, self.builder.neg(self.op))

    def __abs__(self) -> Term:
        return Term(self.builder, self.builder.abs(self.op))

    def __pow__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.pow(self.op, self.of(other)))

    def __lt__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.less_than(self.op, self.of(other)))

    def __le__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.less_or_equal(self.op, self.of(other)))

    def __gt__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.greater_than(self.op, self.of(other)))

    def __ge__(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.greater_or_equal(self.op, self.of(other)))

    def equals(self, other: Term | float) -> Term:
        return Term(self.builder, self.builder.equal(self.op, self.of(other)))

    def __and__(self, other: Term) -> Term:
        return Term(self.builder, self.builder.logical_and(self.op, other.op))

    def __or__(self, other: Term) -> Term:
        return Term(self.builder, self.builder.logical_or(self.op, other.op))

    def __invert__(self) -> Term:
        return Term(self.builder, self.builder.logical_not(self.op))

    def where(self, condition: Term, other: Term | float) -> Term:
        """This one where `condition` holds, `other` elsewhere."""
        return Term(self.builder, self.builder.where(condition.op, self.op, self.of(other)))

    def but(self, condition: Term, other: Term | float) -> Term:
        """This one but where `condition` holds, `other` there."""
        return Term(self.builder, self.builder.where(condition.op, self.of(other), self.op))

    def exp(self) -> Term:
        return Term(self.builder, self.builder.exp(self.op))

    def log(self) -> Term:
        return Term(self.builder, self.builder.log(self.op))

    def log1p(self) -> Term:
        return Term(self.builder, self.builder.log1p(self.op))

    def sqrt(self) -> Term:
        return Term(self.builder, self.builder.sqrt(self.op))

    def sin(self) -> Term:
        return Term(self.builder, self.builder.sin(self.op))

    def cos(self) -> Term:
        return Term(self.builder, self.builder.cos(self.op))

    def erf(self) -> Term:
        return Term(self.builder, self.builder.erf(self.op))

    def sign(self) -> Term:
        return Term(self.builder, self.builder.sign(self.op))

    def floor(self) -> Term:
        return Term(self.builder, self.builder.floor(self.op))

    def round(self) -> Term:
        return Term(self.builder, self.builder.round(self.op))

    def is_nan(self) -> Term:
        return Term(self.builder, self.builder.is_nan(self.op))

    def is_infinite(self) -> Term:
        return abs(self).equals(math.inf)

    def short(self) -> Term:
        """Rounded to 24 bits: its square is exact in float64."""
        assert self.op.shape.dtype is DType.FLOAT64
        return Term(self.builder, self.builder.reduce_precision(self.op, 11, 23))


def polynomial(x: Term, coefficients: Sequence[float]) -> Term:
    """By Horner's rule; the coefficient of the highest power comes first."""
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total


def chebyshev(x: Term, coefficients: Sequence[float]) -> Term:
    """The series of Chebyshev polynomials at x / 2, by Clenshaw's recurrence; the highest order comes first."""
    earlier, before, last = x.number(0.0), x.number(0.0), x.number(coefficients[0])
    for coefficient in coefficients[1:]:
        earlier, before, last = before, last, x * last - before + coefficient
    return (last - earlier) * 0.5
