"""Special functions: held to mpmath, and at infinities, NaN and poles to torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest
import torch

import easytorch.frontend

nan, inf = float("nan"), float("inf")
special = torch.special
Functions = dict[str, tuple[Callable[..., Any], Callable[..., Any]]]


def _scaled(function: Callable[..., Any], order: int, sign: int) -> Callable[[Any], Any]:
    return lambda x: mp.exp(sign * abs(x)) * function(order, x)


# torch's, mpmath's
UNARY: Functions = {
    "lgamma": (torch.lgamma, lambda x: mp.re(mp.loggamma(x))),
    "digamma": (torch.digamma, mp.digamma),
    "trigamma": (lambda x: torch.polygamma(1, x), lambda x: mp.polygamma(1, x)),
    "polygamma 2": (lambda x: torch.polygamma(2, x), lambda x: mp.polygamma(2, x)),
    "polygamma 5": (lambda x: torch.polygamma(5, x), lambda x: mp.polygamma(5, x)),
    "erfc": (torch.erfc, mp.erfc),
    "erfcx": (special.erfcx, lambda x: mp.exp(x * x) * mp.erfc(x)),
    "erfinv": (torch.erfinv, mp.erfinv),
    "ndtr": (special.ndtr, mp.ncdf),
    "ndtri": (special.ndtri, lambda p: mp.sqrt(2) * mp.erfinv(2 * p - 1)),
    "log_ndtr": (special.log_ndtr, lambda x: mp.log(mp.ncdf(x))),
    "i0": (special.i0, lambda x: mp.besseli(0, x)),
    "i0e": (special.i0e, _scaled(mp.besseli, 0, -1)),
    "i1": (special.i1, lambda x: mp.besseli(1, x)),
    "i1e": (special.i1e, _scaled(mp.besseli, 1, -1)),
    "k0": (special.modified_bessel_k0, lambda x: mp.besselk(0, x)),
    "k1": (special.modified_bessel_k1, lambda x: mp.besselk(1, x)),
    "k0e": (special.scaled_modified_bessel_k0, _scaled(mp.besselk, 0, 1)),
    "k1e": (special.scaled_modified_bessel_k1, _scaled(mp.besselk, 1, 1)),
    "j0": (special.bessel_j0, lambda x: mp.besselj(0, x)),
    "j1": (special.bessel_j1, lambda x: mp.besselj(1, x)),
    "y0": (special.bessel_y0, lambda x: mp.bessely(0, x)),
    "y1": (special.bessel_y1, lambda x: mp.bessely(1, x)),
    "spherical j0": (special.spherical_bessel_j0, lambda x: mp.sin(x) / x if x else mp.mpf(1)),
}
BINARY: Functions = {"zeta": (special.zeta, mp.zeta)}
NAMES = [*UNARY, *BINARY]
# Of what torch computes with few digits, or gives a large number at a pole.
POLES = {"trigamma": (-1.0, -2.0), "zeta": (inf, -inf)}
EDGES = [0.0, -0.0, inf, -inf, nan, 1.0, -1.0, -2.0, 2.0]


class Every(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [function(x) for function, _ in UNARY.values()]
        return (*found, *(function(x, y) for function, _ in BINARY.values()))


def points(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    chosen = [
        1e-3,
        -1e-3,
        1e-30,
        0.9999999,
        -0.9999999,
        1.0000001,
        2.0000002,
        13.0,
        1.46,
        -0.5,
        27.0,
        -26.5,
        170.5,
        8.0,
    ]
    drawn = torch.cat(
        [
            torch.randn(12, generator=generator, dtype=torch.float64) * 8,
            torch.rand(8, generator=generator, dtype=torch.float64),
            (torch.randn(8, generator=generator, dtype=torch.float64) * 3).exp(),
        ]
    )
    x = torch.cat([torch.tensor([*EDGES, *chosen], dtype=torch.float64), drawn]).to(dtype)
    y = torch.cat([x.flip(0)[: len(x) - 4], torch.tensor([0.3, -4.7, 40.0, 3.0], dtype=dtype)])
    return x, y


@pytest.fixture(scope="module")
def exact() -> Callable[[str, float, float], float]:
    known: dict[tuple[Any, ...], float] = {}

    def value(name: str, x: float, y: float) -> float:
        """NaN where mpmath has no real number for it."""
        key = (name, x, y) if name in BINARY else (name, x)
        if key not in known:
            with mp.workdps(40):
                try:
                    found = {**UNARY, **BINARY}[name][1](*map(mp.mpf, key[1:]))
                except (ValueError, ZeroDivisionError, NotImplementedError):
                    found = nan
                known[key] = float(found) if mp.im(found) == 0 else nan
        return known[key]

    return value


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("numpy", torch.float32),
        ("numpy", torch.float64),
        ("torch", torch.float64),
        ("xla:cpu", torch.float64),
    ],
    ids=str,
)
def test_values(backend: str, dtype: torch.dtype, exact: Callable[[str, float, float], float]) -> None:
    x, y = points(dtype)
    found = easytorch.frontend.compile(Every(), (x, y), backend=backend)(x, y)
    relative, info = (3e-7 if dtype == torch.float32 else 2e-12), torch.finfo(dtype)
    wrong = []
    for name, result, wanted in zip(NAMES, found, Every()(x.double(), y.double()), strict=True):
        assert result.dtype == dtype
        for at, (given, other) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            ours, theirs = result[at].item(), wanted.to(dtype)[at].item()
            if ours == theirs or (ours != ours and theirs != theirs) or given in POLES.get(name, ()):
                continue
            operands = (given, other) if name in BINARY else (given,)
            right = exact(name, given, other) if all(map(math.isfinite, operands)) else nan
            # XLA takes numbers below the smallest normal one for zero
            if not abs(ours - right) <= relative * abs(right) + info.smallest_normal + 1e-13 * abs(given):
                wrong.append(f"{name}({given}, {other}) = {ours}, not {right}; torch {theirs}")
    assert not wrong, "\n".join(wrong)


def test_integers_and_broadcasts() -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                special.zeta(x[:, None], y),
                special.zeta(2, y),
                torch.lgamma(x),
                special.i0e(x),
                torch.polygamma(3, y),
            )

    given = torch.tensor([2, 3, 7]), torch.tensor([0.5, 1.5], dtype=torch.float32)
    found = easytorch.frontend.compile(Mixed(), given, backend="numpy")(*given)
    for ours, theirs in zip(found, Mixed()(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
