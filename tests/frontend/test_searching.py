"""Positions in sorted sequences, neighbours and parts of floats: torch's own; sizes that depend on data are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import easytorch.frontend
from easytorch.frontend.errors import LoweringError

nan, inf = float("nan"), float("inf")


class Positions(torch.nn.Module):
    def forward(self, line: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        order = rows.flip(-1).argsort(-1)
        return (
            torch.searchsorted(line, values),
            torch.searchsorted(line, values, right=True, out_int32=True),
            torch.searchsorted(rows, values, side="right"),
            torch.searchsorted(rows.flip(-1), values, sorter=order),
            torch.searchsorted(line, 0.5),
            torch.searchsorted(line[:0], values),
            torch.searchsorted((line[:5] * 3).long(), (values[:, :5] * 3).nan_to_num(0, 9, -9).long()),
            torch.bucketize(values, line, right=True),
            torch.bucketize(values.nan_to_num(0, 9, -9).long(), line),
        )


@pytest.mark.parametrize(("backend", "count"), [("numpy", 1), ("numpy", 64), ("torch", 7), ("xla:cpu", 7)])
def test_positions(backend: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    line = torch.randint(-6, 6, (count,), generator=generator).div(2).sort().values
    rows = torch.cat([line, line[:1] - 1, line[-1:] + 1]).sort().values.expand(2, -1).contiguous()
    drawn = torch.randint(-8, 8, (2, 20), generator=generator).div(2)
    values = torch.cat([drawn, torch.tensor([[nan, inf], [-inf, -0.0]])], 1)
    line[-1] = nan if count > 1 else 0.5
    given = line, rows, values
    found = easytorch.frontend.compile(Positions(), given, backend=backend)(*given)
    for ours, theirs in zip(found, Positions()(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Bits(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.nextafter(x, y), *torch.frexp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["numpy", "torch", "xla:cpu"])
def test_bits_of_floats(backend: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = [1.0, -1.0, 0.75, 3e5, -7e-9, inf, -inf, nan, info.max, -info.max, 2 * info.tiny]
    if backend != "xla:cpu":  # which takes numbers below the smallest normal one for zero on a CPU
        numbers += [0.0, -0.0, info.tiny, info.smallest_normal / 8, -info.smallest_normal / 64]
    x, y = (part.reshape(-1) for part in torch.meshgrid(2 * [torch.tensor(numbers, dtype=dtype)], indexing="ij"))
    found = easytorch.frontend.compile(Bits(), (x, y), backend=backend)(x, y)
    for ours, theirs in zip(found, Bits()(x, y), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_sums_of_products() -> None:
    x, left, right = torch.ones(3, 2), torch.randn(4, 3, 5), torch.randn(4, 5, 2)

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.addbmm(x, left, right, beta=0.5, alpha=2)

    given = x, left, right
    torch.testing.assert_close(easytorch.frontend.compile(Sum(), given, backend="numpy")(*given), Sum()(*given))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("bincount", lambda x: torch.bincount(x)),
        ("unique", lambda x: torch.unique(x)),
        ("unique", lambda x: torch.unique_consecutive(x)),
        ("equal", lambda x: x + 1 if torch.equal(x, x + 1) else x),
        ("allclose", lambda x: x + 1 if torch.allclose(x, x + 1) else x),
        ("eig", lambda x: torch.linalg.eig(x.float()[:, None] * x)[0]),
        ("geqrf", lambda x: torch.geqrf(x.float()[:, None] * x)[0]),
    ],
)
def test_the_rest_is_refused_by_name(name: str, function: Callable[[torch.Tensor], Any]) -> None:
    class Asked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    with pytest.raises(LoweringError, match=name):
        easytorch.frontend.compile(Asked(), (torch.arange(5),), backend="numpy")
