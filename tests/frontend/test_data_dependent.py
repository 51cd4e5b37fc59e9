"""What depends on data: `frontend.compile` says so, `torch.compile` breaks the graph there and runs the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import easytorch.frontend
from easytorch.frontend.errors import LoweringError


def a_size(x: torch.Tensor) -> torch.Tensor:
    count = int((x > 0).sum().item())
    return (x * 2).reshape(-1)[:count] + 1


def a_list(x: torch.Tensor) -> torch.Tensor:
    sizes = (x[:3, 0].abs().long() + 1).tolist()
    return torch.cat([part.sum(0, keepdim=True) * 3 for part in torch.zeros(sum(sizes), 2).add(1).split(sizes)])


def a_branch(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    return x + 1 if x.sum() > 0 else x - 1


def a_loop(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for row in (x[:, 0] > 0).nonzero():
        total = total + x[row] * 2
    return total.cos()


def a_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].exp().sum() + x.mean()


def an_assertion(x: torch.Tensor) -> torch.Tensor:
    if (x.isnan().any()).item():
        raise ValueError("NaN")
    return x.tanh()


FUNCTIONS = [a_size, a_list, a_branch, a_loop, a_mask, an_assertion]


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def sample(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compile_refuses_it(function: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(
        LoweringError, match=r"(?s)depends on (the )?data|not known when the program is compiled"
    ) as caught:
        easytorch.frontend.compile(Module(function), (sample(0),), backend="numpy")
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "torch.compile" in message, message
    assert function.__name__ in message or "test_data_dependent.py" in message, message


@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_compile_breaks_there(function: Callable[[torch.Tensor], Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="easytorch", options={"backend": "numpy"})
    for seed in range(3):
        torch.testing.assert_close(compiled(sample(seed)), function(sample(seed)))
