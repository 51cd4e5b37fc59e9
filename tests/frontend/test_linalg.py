"""Linear algebra: torch's own results, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def _svd(a: torch.Tensor, full: bool = False) -> tuple[torch.Tensor, ...]:
    """Singular values, what they give back, and what vectors times their adjoints are: signs are free."""
    u, s, vh = linalg.svd(a, full_matrices=full)
    count = s.shape[-1]
    return s, (u[..., :count] * s.unsqueeze(-2)) @ vh[..., :count, :], u @ u.mH, u.mH @ u, vh @ vh.mH


def _eigh(a: torch.Tensor, triangle: str) -> tuple[torch.Tensor, ...]:
    values, vectors = linalg.eigh(a, triangle)
    return values, (vectors * values.unsqueeze(-2)) @ vectors.mH, vectors.mH @ vectors


# Of a square matrix and a tall one.
SPECTRAL: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "eigh": lambda a, b: (*_eigh(a, "L"), *_eigh(a, "U"), linalg.eigvalsh(b @ b.mH)),
    "svd": lambda a, b: (*_svd(a), *_svd(b, True), *_svd(b.mH, True), linalg.svdvals(b)),
    "deficient": lambda a, b: (*_svd(b @ b.mH), *_svd(a * 0), linalg.matrix_rank(b @ b.mH)),
    "pinv": lambda a, b: (
        linalg.pinv(b),
        linalg.pinv(b @ b.mH),
        linalg.pinv(a @ a.mH, hermitian=True),
        linalg.pinv(a, atol=1.5),
        linalg.pinv(a, rtol=0.3),
    ),
    "norms": lambda a, b: (linalg.matrix_norm(b, "nuc"), linalg.matrix_norm(b, 2), linalg.cond(a)),
    "matrix_exp": lambda a, b: (linalg.matrix_exp(a), linalg.matrix_exp(a * 4), linalg.matrix_exp(a * 0)),
}


@pytest.mark.parametrize(
    ("backend", "dtype", "names"),
    [
        ("numpy", torch.float32, SPECTRAL),
        ("torch", torch.complex128, SPECTRAL),
        # Every factorization is compiled anew.
        ("xla:cpu", torch.float32, ("eigh", "norms", "matrix_exp")),
    ],
    ids=["numpy", "torch", "xla"],
)
def test_spectra(backend: str, dtype: torch.dtype, names: Iterable[str]) -> None:
    generator = torch.Generator().manual_seed(7)
    given = tuple(torch.randn(2, 5, width, generator=generator, dtype=dtype) for width in (5, 3))
    module = Called(lambda a, b: {name: SPECTRAL[name](a, b) for name in names})
    found, wanted = easytorch.frontend.compile(module, given, backend=backend)(*given), module(*given)
    for name in names:
        for number, (ours, theirs) in enumerate(zip(found[name], wanted[name], strict=True)):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(
                ours, theirs, rtol=2e-4, atol=2e-5 * scale, msg=lambda text, at=(name, number): f"{at}: {text}"
            )


def test_spectra_of_odd_matrices() -> None:
    """Graded, of large and of small numbers, diagonal, of an odd count of columns, of equal eigenvalues, with NaN."""
    generator = torch.Generator().manual_seed(8)
    a = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    grades = torch.logspace(0, -12, 7, dtype=torch.float64)
    module = Called(lambda a: (*_svd(a), *_eigh(a + a.mH, "L")))
    program = easytorch.frontend.compile(module, (a,), backend="numpy")
    for given in (a * grades, a * 1e200, a * 1e-200, grades.diag(), torch.eye(7).double() * -3, torch.ones_like(a)):
        scale = float(given.abs().max())
        for ours, theirs in zip(program(given), module(given), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13 * max(scale, float(theirs.abs().max())))
    # The small singular values of graded columns to their own size, which LAPACK's need not be.
    q, _ = linalg.qr(a)
    torch.testing.assert_close(program(q * grades)[0], grades, rtol=1e-12, atol=0)
    assert program(torch.full_like(a, torch.nan))[0].isnan().all()


@pytest.mark.parametrize("size", [0, 1])
def test_small_matrices(size: int) -> None:
    given = (torch.full((3, size, size), 2.0), torch.ones(3, size, 2))
    module = Called(
        lambda a, b: (
            *(linalg.inv(a), linalg.det(a), linalg.solve(a, b), linalg.cholesky(a), *linalg.qr(a)),
            *(linalg.eigvalsh(a), linalg.svdvals(b), *(x.abs() for x in linalg.svd(b)), linalg.matrix_exp(a)),
            *(linalg.pinv(b), linalg.pinv(a, hermitian=True), linalg.pinv(b.mH)),
        )
    )
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


def test_gradients_of_spectra() -> None:
    torch._dynamo.reset()
    a = torch.randn(4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)

    def function(a: torch.Tensor) -> torch.Tensor:
        spectra = linalg.eigh(a + a.mH)[0].pow(3).sum() + linalg.svd(a)[1].log().sum()
        return spectra + linalg.pinv(a).square().sum() + linalg.matrix_exp(a).sum()

    compiled = torch.compile(function, backend="easytorch", fullgraph=True, options={"backend": "torch"})
    for one, other in zip(torch.autograd.grad(compiled(a), a), torch.autograd.grad(function(a), a), strict=True):
        torch.testing.assert_close(one, other)
