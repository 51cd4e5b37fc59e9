"""Bessel functions of orders 0 and 1, by the approximations of the Cephes library, which ATen takes too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from easytorch.frontend import bessel_coefficients as c
from easytorch.frontend.special import special
from easytorch.frontend.terms import Term, chebyshev, polynomial

aten, prims = torch.ops.aten, torch.ops.prims


# --- modified, of the first kind: I


def _scaled_i(x: Term, near: Sequence[float], far: Sequence[float]) -> Term:
    """exp(-x) I(x) for x >= 0; of order 1 it is to be multiplied by x up to 8."""
    large = x.but(x <= 8.0, 8.0)
    return chebyshev(x.but(x > 8.0, 8.0) * 0.5 - 2.0, near).but(
        x > 8.0, chebyshev(32.0 / large - 2.0, far) / large.sqrt()
    )


def _scaled_i0(x: Term) -> Term:
    return _scaled_i(abs(x), c.I0_NEAR, c.I0_FAR)


def _scaled_i1(x: Term) -> Term:
    size = abs(x)
    found = _scaled_i(size, c.I1_NEAR, c.I1_FAR)
    found = (found * size).where(size <= 8.0, found)
    return (-found).where(x < 0.0, found)


@special(aten.special_i0e.default, prims.bessel_i0e.default)
def i0e(x: Term) -> Term:
    return _scaled_i0(x)


@special(aten.i0.default, prims.bessel_i0.default, aten.special_modified_bessel_i0.default)
def i0(x: Term) -> Term:
    return abs(x).exp() * _scaled_i0(x)


@special(aten.special_i1e.default, prims.bessel_i1e.default)
def i1e(x: Term) -> Term:
    return _scaled_i1(x)


@special(aten.special_i1.default, prims.bessel_i1.default, aten.special_modified_bessel_i1.default)
def i1(x: Term) -> Term:
    return abs(x).exp() * _scaled_i1(x)


# --- modified, of the second kind: K


def _scaled_k0(x: Term) -> Term:
    near = chebyshev(x * x - 2.0, c.K0_NEAR) - (x.log() - math.log(2)) * i0(x)
    return _of_positive(x, (near * x.exp()).where(x <= 2.0, chebyshev(8.0 / x - 2.0, c.K0_FAR) / x.sqrt()))


def _scaled_k1(x: Term) -> Term:
    near = (x.log() - math.log(2)) * i1(x) + chebyshev(x * x - 2.0, c.K1_NEAR) / x
    return _of_positive(x, (near * x.exp()).where(x <= 2.0, chebyshev(8.0 / x - 2.0, c.K1_FAR) / x.sqrt()))


def _of_positive(x: Term, found: Term) -> Term:
    """Infinite at 0, NaN below."""
    return found.but(x.equals(0.0), math.inf).but(x < 0.0, math.nan)


@special(aten.special_scaled_modified_bessel_k0.default)
def scaled_k0(x: Term) -> Term:
    return _scaled_k0(x)


@special(aten.special_scaled_modified_bessel_k1.default)
def scaled_k1(x: Term) -> Term:
    return _scaled_k1(x)


@special(aten.special_modified_bessel_k0.default)
def k0(x: Term) -> Term:
    return (-x).exp() * _scaled_k0(x)


@special(aten.special_modified_bessel_k1.default)
def k1(x: Term) -> Term:
    return (-x).exp() * _scaled_k1(x)


# --- of the first and second kind: J, Y


def _wave(x: Term, order: int, second: bool) -> Term:
    """J or Y for x > 5, by its modulus and phase."""
    large = x.but(x <= 5.0, 5.0)
    z = 25.0 / (large * large)
    tables = (
        (c.P0_NUMERATOR, c.P0_DENOMINATOR, c.Q0_NUMERATOR, c.Q0_DENOMINATOR)
        if order == 0
        else (c.P1_NUMERATOR, c.P1_DENOMINATOR, c.Q1_NUMERATOR, c.Q1_DENOMINATOR)
    )
    p_above, p_below, q_above, q_below = (polynomial(z, table) for table in tables)
    p, q = p_above / p_below, 5.0 / large * (q_above / q_below)
    phase = large - (math.pi / 4 if order == 0 else 3 * math.pi / 4)
    turned = p * phase.sin() + q * phase.cos() if second else p * phase.cos() - q * phase.sin()
    return turned * math.sqrt(2 / math.pi) / large.sqrt()


def _j0(x: Term) -> Term:
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = near * polynomial(square, c.J0_NUMERATOR) / polynomial(square, c.J0_DENOMINATOR)
    return (1.0 - square / 4.0).where(x < 1e-5, near).where(x <= 5.0, _wave(x, 0, second=False))


def _j1(x: Term) -> Term:
    square = x * x
    near = polynomial(square, c.J1_NUMERATOR) / polynomial(square, c.J1_DENOMINATOR) * x
    near = near * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    return near.where(x <= 5.0, _wave(x, 1, second=False))


@special(aten.special_bessel_j0.default, prims.bessel_j0.default)
def j0(x: Term) -> Term:
    return _j0(abs(x))


@special(aten.special_bessel_j1.default, prims.bessel_j1.default)
def j1(x: Term) -> Term:
    found = _j1(abs(x))
    return (-found).where(x < 0.0, found)


@special(aten.special_bessel_y0.default)
def y0(x: Term) -> Term:
    square = x * x
    near = polynomial(square, c.Y0_NUMERATOR) / polynomial(square, c.Y0_DENOMINATOR)
    near = near + x.log() * _j0(x) * (2 / math.pi)
    found = near.where(x <= 5.0, _wave(x, 0, second=True))
    return found.but(x.equals(0.0), -math.inf).but(x < 0.0, math.nan)


@special(aten.special_bessel_y1.default)
def y1(x: Term) -> Term:
    square = x * x
    near = x * (polynomial(square, c.Y1_NUMERATOR) / polynomial(square, c.Y1_DENOMINATOR))
    near = near + (_j1(x) * x.log() - 1.0 / x) * (2 / math.pi)
    found = near.where(x <= 5.0, _wave(x, 1, second=True))
    return found.but(x.equals(0.0), -math.inf).but(x < 0.0, math.nan)


@special(aten.special_spherical_bessel_j0.default, prims.spherical_bessel_j0.default)
def spherical_j0(x: Term) -> Term:
    """sin(x) / x, by its series near 0."""
    square = x * x
    series = polynomial(square, [(-1) ** n / math.factorial(2 * n + 1) for n in reversed(range(7))])
    return series.where(abs(x) < 0.5, x.sin() / x).but(x.is_infinite(), 0.0)
