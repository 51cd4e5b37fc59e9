"""The error function's complement, scaled and inverse, and those of the normal distribution."""

from __future__ import annotations

import math

import torch

from easytorch.frontend.special import special
from easytorch.frontend.terms import Term, polynomial

aten, prims = torch.ops.aten, torch.ops.prims

# exp(x^2) erfc(x) as a quotient, from 1 to 8 and from 8 on: Cephes (Moshier), ndtr.c.
_MIDDLE = (
    (
        *(2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687, 4.86371970985681366614e1),
        *(1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3),
        5.57535335369399327526e2,
    ),
    (
        *(1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2),
        *(9.75708501743205489753e2, 1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3),
        5.57535340817727675546e2,
    ),
)
_FAR = (
    (
        *(5.64189583547755073984e-1, 1.27536670759978104416, 5.01905042251180477414, 6.16021097993053585195),
        *(7.40974269950448939160, 2.97886665372100240670),
    ),
    (
        *(1.0, 2.26052863220117276590, 9.39603524938001434673, 1.20489539808096656605e1),
        *(1.70814450747565897222e1, 9.60896809063285878198, 3.36907645100081516050),
    ),
)
_CENTRE = (
    (
        *(-5.99633501014107895267e1, 9.80010754185999661536e1, -5.66762857469070293439e1, 1.39312609387279679503e1),
        -1.23916583867381258016,
    ),
    (
        *(1.0, 1.95448858338141759834, 4.67627912898881538453, 8.63602421390890590575e1, -2.25462687854119370527e2),
        *(2.00260212380060660359e2, -8.20372256168333339912e1, 1.59056225126211695515e1, -1.18331621121330003142),
    ),
)
_TAIL = (
    (
        *(4.05544892305962419923, 3.15251094599893866154e1, 5.71628192246421288162e1, 4.40805073893200834700e1),
        *(1.46849561928858024014e1, 2.18663306850790267539, -1.40256079171354495875e-1, -3.50424626827848203418e-2),
        -8.57456785154685413611e-4,
    ),
    (
        *(1.0, 1.57799883256466749731e1, 4.53907635128879210584e1, 4.13172038254672030440e1),
        *(1.50425385692907503408e1, 2.50464946208309415979, -1.42182922854787788574e-1, -3.80806407691578277194e-2),
        -9.33259480895457427372e-4,
    ),
)
_END = (
    (
        *(3.23774891776946035970, 6.91522889068984211695, 3.93881025292474443415, 1.33303460815807542389),
        *(2.01485389549179081538e-1, 1.23716634817820021358e-2, 3.01581553508235416007e-4),
        *(2.65806974686737550832e-6, 6.23974539184983293730e-9),
    ),
    (
        *(1.0, 6.02427039364742014255, 3.67983563856160859403, 1.37702099489081330271, 2.16236993594496635890e-1),
        *(1.34204006088543189037e-2, 3.28014464682127739104e-4, 2.89247864745380683936e-6, 6.79019408009981274425e-9),
    ),
)


def _quotient(x: Term, tables: tuple[tuple[float, ...], tuple[float, ...]]) -> Term:
    return polynomial(x, tables[0]) / polynomial(x, tables[1])


def _scaled_complement(x: Term) -> Term:
    """exp(x^2) erfc(x) for x >= 1."""
    middle = _quotient(x.but(x > 8.0, 8.0), _MIDDLE)
    far = _quotient(x.but(x > 1e8, 1e8), _FAR)
    found = middle.where(x < 8.0, far)
    return found.but(x > 1e8, 1 / math.sqrt(math.pi) / x)


@special(aten.erfc.default, prims.erfc.default)
def erfc(x: Term) -> Term:
    size = abs(x)
    short = size.short()
    # exp(-x^2), whose argument must not be rounded: by the square of few bits, which is exact, and what is left.
    gauss = (-(short * short)).exp() * ((short - size) * (short + size)).exp()
    tail = (gauss * _scaled_complement(size)).but(size > 28.0, 0.0)
    return (1.0 - x.erf()).where(size < 1.0, (2.0 - tail).where(x < 0.0, tail))


@special(aten.special_erfcx.default, prims.erfcx.default)
def erfcx(x: Term) -> Term:
    """exp(x^2) erfc(x)."""
    size = abs(x)
    grown = (x * x).exp()
    near = grown * (1.0 - x.erf())
    tail = _scaled_complement(size)
    # beyond 26.7 the exponential is infinite
    return near.where(size < 1.0, (grown * 2.0 - tail).where(x < 0.0, tail))


@special(aten.erfinv.default, prims.erf_inv.default)
def erf_inv(x: Term) -> Term:
    """A rational approximation and two of Newton's steps, as ATen's (aten/src/ATen/native/Math.h, calc_erfinv).

    The steps divide by a slope that is as small near 1 as the difference of erf from it: erfc keeps its digits there.
    """
    size, square = abs(x), x * x
    near = x * polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    near = near / polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0))
    rest = 1.0 - size
    z = (-(rest * 0.5).log()).sqrt()
    far = polynomial(z, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    far = far / polynomial(z, (1.637067800, 3.543889200, 1.0))
    for _ in range(2):
        near = near - (near.erf() - x) / _erf_slope(near)
        far = far + (erfc(far) - rest) / _erf_slope(far)
    return near.where(size <= 0.7, x.sign() * far).but(size.equals(1.0), x * math.inf)


def _erf_slope(x: Term) -> Term:
    return (-(x * x)).exp() * (2 / math.sqrt(math.pi))


@special(aten.special_ndtri.default, prims.ndtri.default)
def ndtri(p: Term) -> Term:
    """The quantile of the standard normal distribution (Cephes, ndtri.c)."""
    edge = math.exp(-2.0)
    upper = p > 1.0 - edge
    y = (1.0 - p).where(upper, p)
    centred = y - 0.5
    square = centred * centred
    centre = (centred + centred * (square * _quotient(square, _CENTRE))) * math.sqrt(2 * math.pi)
    x = (y.log() * -2.0).sqrt()
    z = 1.0 / x
    correction = (z * _quotient(z, _TAIL)).where(x < 8.0, z * _quotient(z, _END))
    tail = x - x.log() / x - correction
    found = centre.where(y > edge, tail.where(upper, -tail))
    found = found.but(p.equals(0.0), -math.inf).but(p.equals(1.0), math.inf)
    return found.but((p < 0.0) | (p > 1.0), math.nan)


@special(aten.special_ndtr.default)
def ndtr(x: Term) -> Term:
    """The standard normal distribution function; torch's own loses its digits below 0."""
    return erfc(x * -math.sqrt(0.5)) * 0.5


@special(aten.special_log_ndtr.default)
def log_ndtr(x: Term) -> Term:
    """The logarithm of the standard normal distribution function."""
    scaled = x * math.sqrt(0.5)
    far = (erfcx(-scaled) * 0.5).log() - scaled * scaled
    near = (erfc(scaled) * -0.5).log1p()
    return far.where(x < -1.0, near)
