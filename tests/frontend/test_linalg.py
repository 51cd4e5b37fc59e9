"""Linear algebra: torch's own results, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import easytorch.frontend

linalg = torch.linalg


def _spd(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mH + 2 * torch.eye(a.shape[-1], dtype=a.dtype)


# Of a square matrix and a right side.
SQUARE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "solve_triangular": lambda a, b: (
        linalg.solve_triangular(a.tril(), b, upper=False),
        linalg.solve_triangular(a.triu(), b, upper=True, unitriangular=True),
        linalg.solve_triangular(a.triu()[0], b.mH, upper=True, left=False),
        torch.triangular_solve(b, a.tril(), upper=False, transpose=True)[0],
    ),
    "cholesky": lambda a, b: (
        linalg.cholesky(_spd(a)),
        linalg.cholesky(_spd(a), upper=True),
        torch.cholesky_solve(b, linalg.cholesky(_spd(a))),
        torch.cholesky_inverse(linalg.cholesky(_spd(a), upper=True), upper=True),
        linalg.cholesky_ex(-_spd(a)).info,
    ),
    "solve": lambda a, b: (linalg.solve(a, b), linalg.solve(a, b.mH, left=False), linalg.solve(a, b[..., 0])),
    "inverse and determinants": lambda a, b: (
        linalg.inv(a),
        linalg.det(a),
        *linalg.slogdet(a),
        torch.logdet(_spd(a).real),
    ),
    "lu": lambda a, b: (
        *torch.lu_unpack(*linalg.lu_factor(a)),
        *linalg.lu(a @ b),
        *linalg.lu_factor_ex(a * 0),
        linalg.lu_solve(*linalg.lu_factor(a), b, adjoint=True),
        linalg.lu_solve(*linalg.lu_factor(a), b.mH, left=False),
    ),
    "qr": lambda a, b: (*linalg.qr(b), *linalg.qr(b.mH), *linalg.qr(b, mode="complete"), linalg.qr(b, mode="r").R),
}


class Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("numpy", torch.float32), ("numpy", torch.complex128), ("torch", torch.complex128), ("xla:cpu", torch.float32)],
    ids=str,
)
def test_square_systems(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    given = tuple(torch.randn(2, 5, width, generator=generator, dtype=dtype) for width in (5, 3))
    module = Called(lambda a, b: {name: function(a, b) for name, function in SQUARE.items()})
    found, wanted = easytorch.frontend.compile(module, given, backend=backend)(*given), module(*given)
    for name in SQUARE:
        for number, (ours, theirs) in enumerate(zip(found[name], wanted[name], strict=True)):
            torch.testing.assert_close(
                ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda text, at=(name, number): f"{at}: {text}"
            )


@pytest.mark.parametrize("size", [0, 1])
def test_small_matrices(size: int) -> None:
    given = (torch.full((3, size, size), 2.0), torch.ones(3, size, 2))
    module = Called(lambda a, b: (linalg.inv(a), linalg.det(a), linalg.solve(a, b), linalg.cholesky(a), *linalg.qr(a)))
    for ours, theirs in zip(
        easytorch.frontend.compile(module, given, backend="numpy")(*given), module(*given), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_what_torch_raises_for_is_not_finite() -> None:
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    module = Called(lambda a: (linalg.inv(a), linalg.cholesky(-a)))
    for found in easytorch.frontend.compile(module, (singular,), backend="numpy")(singular):
        assert not found.isfinite().all()


def test_torch_compile_knows_them() -> None:
    torch._dynamo.reset()
    a = _spd(torch.randn(4, 4, generator=torch.Generator().manual_seed(5)))
    compiled = torch.compile(lambda a: linalg.inv(a) @ linalg.cholesky(a), backend="easytorch", fullgraph=True)
    torch.testing.assert_close(compiled(a), linalg.inv(a) @ linalg.cholesky(a), rtol=1e-4, atol=1e-5)
