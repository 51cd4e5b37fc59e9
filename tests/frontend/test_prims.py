"""Operations that torch decomposes to its primitives (torch.ops.prims), on every backend, held to eager torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import easytorch.frontend

nan, inf = float("nan"), float("inf")
INTEGERS = (
    torch.tensor([0, 0, 12, -12, 7, 2**40, -(2**40), 1, 270]),
    torch.tensor([0, 5, 18, 18, 1, 2**38, 6, -1, -192]),
)
SMALL = (torch.tensor([0, 5, 200, 7], dtype=torch.uint8), torch.tensor([3, 0, 120, 7], dtype=torch.uint8))
SHIFTS = (torch.tensor([1, -1, 5, -9, 7, -3, 1]), torch.tensor([3, 2, 63, 64, -1, -1, 0]))
SMALL_SHIFTS = (torch.tensor([1, 200, 255, 3], dtype=torch.uint8), torch.tensor([3, 2, 7, 8], dtype=torch.uint8))
SPECIAL = (
    torch.tensor([1.5, -0.0, 0.0, nan, -inf, inf, 3e30, nan, 1e-30]),
    torch.tensor([nan, 2.0, -0.0, nan, nan, -1.0, -4e30, -inf, 1e-30]),
)
UNIT = (torch.tensor([-1.0, -0.999, -0.7, -0.1, 0.0, 1e-6, 0.5, 0.71, 0.99999, 1.0, 1.5, nan]), torch.zeros(1))


CASES: tuple[tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, torch.Tensor]], ...] = (
    (torch.gcd, INTEGERS),
    (torch.gcd, SMALL),
    (torch.lcm, tuple(x.int() for x in SMALL)),
    (torch.gcd, (torch.tensor(24), torch.tensor(18))),
    (torch.bitwise_left_shift, SHIFTS),
    (torch.bitwise_right_shift, SHIFTS),
    (torch.bitwise_left_shift, SMALL_SHIFTS),
    (torch.bitwise_right_shift, SMALL_SHIFTS),
    (torch.fmax, SPECIAL),
    (torch.fmin, SPECIAL),
    (torch.fmax, INTEGERS),
    (torch.hypot, SPECIAL),
    (torch.copysign, SPECIAL),
    (lambda x, y: torch.erfinv(x), UNIT),
    (lambda x, y: torch.signbit(x) ^ torch.signbit(-y.nan_to_num().bfloat16()), SPECIAL),
    (lambda x, y: torch.signbit(x) | torch.signbit(y), INTEGERS),
)


class Functions(torch.nn.Module):
    """All cases as one program: each of its own takes as long to capture as all of them."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return tuple(function(*pair) for (function, _), pair in zip(CASES, pairs, strict=True))


@pytest.mark.parametrize("backend", ["numpy", "torch", "xla:cpu"])
def test_are_as_eager(backend: str) -> None:
    given = [tensor for _, pair in CASES for tensor in pair]
    results = easytorch.frontend.compile(Functions(), given, backend=backend)(*given)
    for number, (result, expected) in enumerate(zip(results, Functions()(*given), strict=True)):
        torch.testing.assert_close(
            result, expected, rtol=4e-6, atol=0, equal_nan=True, msg=lambda m, n=number: f"case {n}: {m}"
        )


def test_torch_compile_knows_them() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: torch.lcm(x, y) + torch.gcd(x, y), backend="easytorch", fullgraph=True)
    given = tuple(x.clamp(-300, 300) for x in INTEGERS)
    torch.testing.assert_close(compiled(*given), torch.lcm(*given) + torch.gcd(*given))
