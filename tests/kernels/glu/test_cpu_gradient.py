"""The gradients of swiglu and geglu in C++: every instruction set this CPU has, odd sizes, any layout, each order."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.cpu import library
from easytorch.kernels.glu import cpu
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.glu.test_cpu import DTYPES, OPTIONS, UNITS, needs_library, unit
from tests.kernels.linear.guard import guarded


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("level", library.levels_of("glu"))
def test_odd_sizes_at_every_level(level: int, name: str) -> None:
    activation, definition = UNITS[name]
    generator = torch.Generator().manual_seed(level)
    for dtype in DTYPES:
        for n in (1, 7, 15, 17, 33, 64, 1000):
            grad, *tensors = (torch.randn(5, n, generator=generator).mul(3).to(dtype) for _ in range(3))
            gate, up = (x.double().requires_grad_() for x in tensors)
            expected = torch.autograd.grad(definition(gate, up), (gate, up), grad.double())
            leaves = [guarded(x).requires_grad_() for x in tensors]
            got = torch.autograd.grad(cpu.run(*leaves, activation, level), leaves, guarded(grad))
            for one, wanted in zip(got, expected, strict=True):
                assert one.dtype == dtype and relative_rms_error(one, wanted) <= TOLERANCE[dtype], (dtype, n)


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("level", library.levels_of("glu"))
def test_the_tails_are_the_definitions(level: int, name: str) -> None:
    activation, definition = UNITS[name]
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.logspace(-40, 18, 301), -torch.logspace(-40, 18, 301)])
    leaves = [gate.requires_grad_(), torch.ones_like(gate).requires_grad_()]
    got, expected = (
        torch.autograd.grad(output.sum(), leaves)
        for output in (cpu.run(*leaves, activation, level), definition(*leaves))
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@needs_library
@pytest.mark.parametrize("name", UNITS)
def test_any_layout_and_every_order(name: str) -> None:
    operation, options = OPTIONS[name]
    activation, definition = UNITS[name]
    wide = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    for gate in (
        wide[:3, ::2],
        wide.t()[:, :5].t(),
        wide[:1].expand(4, 40),
        wide[:0],
        wide[:3, :0],
        torch._neg_view(wide),
    ):
        leaves = [gate.detach().requires_grad_(), (gate + 1).requires_grad_()]
        for grad in (
            torch.ones(()).expand(gate.shape),
            torch.randn(gate.shape[::-1]).permute(*range(gate.dim())[::-1]),
        ):
            got = torch.autograd.grad(unit(operation, "cpu")(*leaves, **options), leaves, grad)
            expected = torch.autograd.grad(definition(*leaves), leaves, grad)
            torch.testing.assert_close(got, expected)
    leaves = [wide[0].clone().requires_grad_(), wide[1].clone().requires_grad_()]

    def penalty(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), leaves)

    found = penalty(cpu.run(*leaves, activation, library.BEST))
    torch.testing.assert_close(found, penalty(definition(*leaves)), rtol=1e-4, atol=1e-4)
    for place in (0, 1):
        leaves = [wide[n].clone().requires_grad_(n == place) for n in (0, 1)]
        cpu.run(*leaves, activation, library.BEST).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [place == 0, place == 1]
