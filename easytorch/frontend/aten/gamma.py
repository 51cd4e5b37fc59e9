"""The logarithm of the gamma function, its derivatives, and Hurwitz's zeta function."""

from __future__ import annotations

import math

import torch

from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering
from easytorch.frontend.special import in_float64, special
from easytorch.frontend.terms import Term, polynomial

aten, prims = torch.ops.aten, torch.ops.prims

# log(gamma(x + 2)) / x from 0 to 1, and Stirling's series of 1 / x^2: Cephes (Moshier), gamma.c.
_NUMERATOR = (
    *(-1.37825152569120859100e3, -3.88016315134637840924e4, -3.31612992738871184744e5, -1.16237097492762307383e6),
    *(-1.72173700820839662146e6, -8.53555664245765465627e5),
)
_DENOMINATOR = (
    *(1.0, -3.51815701436523470549e2, -1.70642106651881159223e4, -2.20528590553854454839e5),
    *(-1.13933444367982507207e6, -2.53252307177582951285e6, -2.01889141433532773231e6),
)
_STIRLING = (
    *(8.11614167470508450300e-4, -5.95061904284301438324e-4, 7.93650340457716943945e-4),
    *(-2.77777777730099687205e-3, 8.33333333333331927722e-2),
)
# Of the series of 1 / x^2 that ends log(x) - 1 / 2x.
_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
# (2k)! / B2k, of the Euler-Maclaurin sum.
_ZETA = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10),
    *(-2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17),
    -7.1661652561756670113e18,
)
_EPSILON = 2.0**-53


def _log_gamma_of_positive(x: Term) -> Term:
    small = x.but(x > 13.0, 2.5)
    # gamma(x) = (x - 1) ... gamma(r) with r from 2 to 3, or gamma(x + 2) / x (x + 1): logarithms of small numbers by
    # log1p, so that the results near the zeros at 1 and 2 keep their digits.
    rest, product = small, small.number(1.0)
    for _ in range(11):
        above = rest >= 3.0
        lower = rest - 1.0
        rest, product = lower.where(above, rest), (product * lower).where(above, product)
    logarithm = product.log()
    logarithm = logarithm.but(small < 2.0, -(small - 1.0).log1p())
    logarithm = logarithm.but(small < 0.9, -small.log() - small.log1p())
    over = (rest - 2.0).but(small < 2.0, small - 1.0).but(small < 0.9, small)
    near = logarithm + over * polynomial(over, _NUMERATOR) / polynomial(over, _DENOMINATOR)
    large = x.but(x <= 13.0, 13.0)
    far = (large - 0.5) * large.log() - large + 0.5 * math.log(2 * math.pi)
    far = far + polynomial(1.0 / (large * large), _STIRLING) / large
    return near.where(x <= 13.0, far)


@special(aten.lgamma.default, prims.lgamma.default)
def lgamma(x: Term) -> Term:
    """log |gamma(x)|; below 0 by reflection."""
    size = abs(x)
    positive = _log_gamma_of_positive(size)
    sine = ((x - x.round()) * math.pi).sin()
    negative = math.log(math.pi) - abs(sine).log() - size.log() - positive
    found = negative.where(x < 0.0, positive)
    pole = x.equals(x.round()) & (x <= 0.0)
    return found.but(pole | x.is_infinite(), math.inf)


def _digamma_of_positive(x: Term) -> Term:
    total, raised = x.number(0.0), x
    for _ in range(10):
        small = raised < 10.0
        total = (total - 1.0 / raised).where(small, total)
        raised = (raised + 1.0).where(small, raised)
    square = 1.0 / (raised * raised)
    return total + raised.log() - 0.5 / raised - square * polynomial(square, _DIGAMMA)


@special(aten.digamma.default, prims.digamma.default)
def digamma(x: Term) -> Term:
    """The derivative of log gamma; below 0 by reflection."""
    negative = x < 0.0
    positive = _digamma_of_positive((1.0 - x).where(negative, x.but(x.equals(0.0), 1.0)))
    turn = (x - x.round()) * math.pi
    found = (positive - turn.cos() / turn.sin() * math.pi).where(negative, positive)
    found = found.but(negative & (x.equals(x.round()) | x.is_infinite()), math.nan)
    # minus infinity at 0, infinity at -0
    return found.but(x.equals(0.0), -1.0 / x)


def _trigamma(x: Term) -> Term:
    reflected = x < 0.5
    sine = ((x - x.round()) * math.pi).sin()
    raised = (1.0 - x).where(reflected, x)
    total = x.number(0.0)
    for _ in range(10):
        total, raised = total + 1.0 / (raised * raised), raised + 1.0
    square = 1.0 / (raised * raised)
    series = polynomial(square, (7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6, 1.0))
    total = total + (series + 0.5 / raised) / raised
    return (math.pi**2 / (sine * sine) - total).where(reflected, total)


def _zeta_of_positive(x: Term, q: Term) -> Term:
    """The sum of (q + k)^-x for x > 1, q > 0, by Euler and Maclaurin (Cephes, zeta.c)."""
    total, last, at = q**-x, q.number(0.0), q
    settled = x > math.inf  # further terms change the sum no more
    for _ in range(9):
        at = at + 1.0
        last = last.where(settled, at**-x)
        total = total.where(settled, total + last)
        settled = settled | (last < total * _EPSILON) | (last.equals(0.0) & (at < math.inf))
    found = total.where(settled, total + last * at / (x - 1.0) - last * 0.5)
    factor, power = x.number(1.0), last
    for number, divisor in enumerate(_ZETA):
        factor, power = factor * (x + 2.0 * number), power / at
        term = factor * power / divisor
        found = found.where(settled, found + term)
        settled = settled | (abs(term) < abs(found) * _EPSILON)
        factor, power = factor * (x + (2.0 * number + 1.0)), power / at
    return found


def _zeta(x: Term, q: Term) -> Term:
    """Terms of negative q + k by their absolute values, whose sum is the difference of two such series."""
    rest = q - q.floor()
    halves = x * 0.5
    sign = (1.0 - (halves - halves.floor()) * 4.0).but(x.is_infinite(), 1.0)
    below = _zeta_of_positive(x, -((-q).floor()) - q) - _zeta_of_positive(x, 1.0 - q)
    negative = q < 0.0
    found = _zeta_of_positive(x, rest.where(negative, q))
    found = (found + sign * below).where(negative, found)
    integer = q.equals(q.floor())
    found = found.but((q <= 0.0) & ~x.equals(x.floor()), math.nan).but((q <= 0.0) & integer, math.inf)
    return found.but(x < 1.0, math.nan).but(x.equals(1.0), math.inf)


@lowering(
    *(aten.special_zeta.default, aten.special_zeta.self_scalar, aten.special_zeta.other_scalar, prims.zeta.default)
)
def zeta(ctx: Context, x: Op | float, q: Op | float) -> Op:
    """Hurwitz's zeta function."""
    return in_float64(ctx, _zeta, x, q)


@lowering(aten.polygamma.default)
def polygamma(ctx: Context, n: int, x: Op) -> Op:
    """The n-th derivative of digamma."""
    if n == 0:
        return in_float64(ctx, digamma, x)
    if n == 1:
        return in_float64(ctx, _trigamma, x)

    def derivative(x: Term) -> Term:
        factorial = math.exp(math.lgamma(n + 1.0)) if n <= 170 else math.inf
        return _zeta(x.number(n + 1.0), x) * (factorial if n % 2 else -factorial)

    return in_float64(ctx, derivative, x)
