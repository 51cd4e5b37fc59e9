"""Settings that change which elements are taken, or by what they are divided: each against eager torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

import easytorch.frontend


class Calls(torch.nn.Module):
    """One function under many settings: one program."""

    def __init__(self, calls: list[tuple[Any, dict[str, Any]]]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *inputs: torch.Tensor) -> Any:
        return [function(*inputs, **settings) for function, settings in self.calls]


def check(calls: list[tuple[Any, dict[str, Any]]], *inputs: torch.Tensor) -> None:
    module = Calls(calls)
    results = easytorch.frontend.compile(module, inputs, backend="torch")(*inputs)
    for found, wanted, (function, settings) in zip(results, module(*inputs), calls, strict=True):
        try:
            torch.testing.assert_close(found, wanted, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{function.__name__}({settings}): {error}") from error


def sizes(spatial: int) -> torch.Tensor:
    """Of which neither a stride of 2 nor one of 3 takes everything; no two elements are equal."""
    shape = (2, 2, *(8, 7, 6)[:spatial])
    count = torch.Size(shape).numel()
    return torch.randperm(count, generator=torch.Generator().manual_seed(spatial)).reshape(shape).float() / 7 - 5


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_pooling(spatial: int) -> None:
    calls = []
    largest, average = (getattr(functional, f"{kind}_pool{spatial}d") for kind in ("max", "avg"))
    for kernel, stride, padding, ceil_mode in itertools.product((2, 3), (2, 3), (0, 1), (False, True)):
        settings = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
        calls.append((largest, settings))
        for counted in (False, True):
            calls.append((average, settings | {"count_include_pad": counted}))
            if spatial > 1 and stride == 3:
                calls.append((average, settings | {"count_include_pad": counted, "divisor_override": 5}))
    check(calls, sizes(spatial))


@pytest.mark.parametrize("spatial", [2, 3])
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_of_pooling(spatial: int, counted: bool) -> None:
    """Divisors are those of the forward, at the ends as in the middle."""
    torch._dynamo.reset()
    for ceil_mode, divisor in ((False, None), (True, None), (True, 3)):

        def pooled(x: torch.Tensor, ceil_mode: bool = ceil_mode, divisor: int | None = divisor) -> torch.Tensor:
            pool = getattr(functional, f"avg_pool{spatial}d")
            found = pool(x, 3, 2, 1, ceil_mode, counted, divisor)
            return found * torch.arange(found.numel()).reshape(found.shape)

        gradients = []
        for function in (pooled, torch.compile(pooled, backend="easytorch", options={"backend": "numpy"})):
            x = sizes(spatial).requires_grad_()
            function(x).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0], msg=lambda text: f"{ceil_mode} {divisor}: {text}")  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_epsilon_of_rms_norm(dtype: torch.dtype) -> None:
    """Of inputs so small that it decides; the one of the type that ATen computes in, unless it is given."""
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0], [5.0, 1.0, 2.0]], dtype=dtype)

    def scaled(x: torch.Tensor, scale: float, eps: float | None) -> torch.Tensor:
        return functional.rms_norm(x * scale, (3,), None, eps)

    scales, epsilons = (1.0, 1e-3, 1e-5, 1e-9), (None, 1e-2, 1e-12)
    check([(scaled, {"scale": scale, "eps": eps}) for scale in scales for eps in epsilons], x)


def test_running_logarithms_of_sums() -> None:
    """Where everything so far is -inf, two infinities meet, or NaN comes: none makes what follows NaN that is not."""
    inf, nan = torch.inf, torch.nan
    rows = [
        [-inf, -inf, -inf, 0.0, 1.0, -inf],
        [-inf, 2.0, -inf, inf, inf, 1.0],
        [inf, inf, -inf, 0.0, -1.0, inf],
        [0.0, 800.0, -800.0, 800.0, 1.0, 2.0],
        [1.0, nan, 2.0, -inf, inf, 0.0],
        [-inf, -inf, -inf, -inf, -inf, -inf],
    ]
    calls = [(torch.logcumsumexp, {"dim": 0}), (torch.logcumsumexp, {"dim": 1}), (torch.logsumexp, {"dim": 1})]
    for dtype in (torch.float32, torch.float64):
        check(calls, torch.tensor(rows, dtype=dtype))
