"""NaN, infinities, signed zeros, wrap-around and promotion, as ATen has them: one module of many results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from easytorch import frontend
from easytorch.frontend.module import CompiledModule
from easytorch.frontend.routing import backend_of

NAN, INF = float("nan"), float("inf")
X = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 2.5, -7.0, 1e30])
Y = torch.tensor([1.0, 2.0, 3.0, -2.0, NAN, -1.0, INF, 0.0, 2.0, -3.0])
A = torch.tensor([7, -7, 8, -8, 0], dtype=torch.int32)
B = torch.tensor([3, 3, -3, -3, 5], dtype=torch.int32)
U = torch.tensor([0, 5, 250], dtype=torch.uint8)

UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(torch.sign, torch.abs, torch.round, torch.trunc, torch.isinf, torch.isnan, torch.relu, torch.reciprocal),
    *(torch.sinh, torch.cosh, torch.asinh, torch.acosh, torch.log2, torch.exp2, torch.argmax, torch.argmin),
    *(F.softplus, F.elu, F.leaky_relu, F.mish, F.silu, F.hardtanh),
    lambda x: x.clamp(-1, 1),
    lambda x: x.clamp(5, 3),
    lambda x: 2**x,
    lambda x: torch.rsub(x, 1.5, alpha=2),
    lambda x: x[-3:None:2].flip(0),
    lambda x: x.unfold(0, 3, 2),
    lambda x: x.view(2, 5).diagonal(1),
]
BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    *(torch.floor_divide, torch.remainder, torch.fmod, torch.maximum, torch.pow, torch.atan2),
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: torch.where(x > 0, x, y.double()),
]
WHOLE: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    *(torch.floor_divide, torch.remainder, torch.fmod, torch.true_divide),
    lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: a**3 + b,
    lambda a, b: a.sum() + b.prod(),
    lambda a, b: (a * 2.5) + b.any(),
]


class Everything(torch.nn.Module):
    """Every result of the lists above."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, u: torch.Tensor) -> Any:
        return (
            [function(x) for function in UNARY],
            [function(x, y) for function in BINARY],
            [function(a, b) for function in WHOLE],
            [u + 300, u * 2.5, u - 7, u.abs(), -u, u.any()],
        )


@pytest.mark.jax_cpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_edges_are_those_of_aten() -> None:
    module, inputs = Everything(), (X, Y, A, B, U)
    program = frontend.capture(module, inputs)
    wanted = module(*inputs)
    for name in ("numpy", "torch", "xla"):
        got = CompiledModule(module, program, backend_of(name))(*inputs)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=2e-6, atol=1e-7)


class Emptied(torch.nn.Module):
    """Rows that see nothing, arrays without elements, and fills that are no float."""

    def forward(self, x: torch.Tensor, z: torch.Tensor, n: torch.Tensor) -> Any:
        hidden = torch.where(x > 0.5, x, -INF).index_fill(0, torch.tensor([1]), -INF)
        nothing = x[:0].reshape(-1)
        return (
            torch.ops.aten._safe_softmax(hidden, -1),
            torch.ops.aten._safe_softmax(hidden, 0, dtype=torch.float64),
            torch.ops.aten._safe_softmax(hidden.index_fill(1, torch.tensor([0]), NAN), -1),
            F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=hidden @ hidden.mT < INF),
            nothing.take(torch.zeros(0, dtype=torch.int64)),
            x[:0].index_select(0, torch.zeros(0, dtype=torch.int64)),
            *torch.linalg.svd(x.reshape(2, 2, 3)[:0], full_matrices=False),
            *torch.linalg.svd(x[:, :0], full_matrices=False),
            torch.linalg.svdvals(x.reshape(2, 2, 3)[:0]),
            F.pad(z, (1, 2)),
            torch.constant_pad_nd(z, (1, 2), 2 - 3j),
            torch.fft.fft2(z, s=(7, 9)),
            torch.constant_pad_nd(n, (1, 0), 2**53 + 1),
        )


@pytest.mark.jax_cpu
def test_of_nothing() -> None:
    generator = torch.Generator().manual_seed(7)
    x, z = (
        torch.randn(*size, generator=generator, dtype=kind)
        for size, kind in (((4, 3), None), ((2, 3), torch.complex64))
    )
    inputs = x, z, torch.tensor([3, 2**60 + 1])
    module = Emptied()
    program = frontend.capture(module, inputs)
    wanted = module(*inputs)
    assert (wanted[0][1] == 0).all()
    for name in ("numpy", "torch", "xla"):
        got = CompiledModule(module, program, backend_of(name))(*inputs)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=2e-6, atol=1e-6)


def test_istft_of_several_signals() -> None:
    """Its windows are those of one signal, for all of them."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    window = torch.hann_window(16)

    class Back(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.istft(torch.stft(x, 16, 4, window=window, return_complex=True), 16, 4, window=window)

    found = frontend.compile(Back(), (x,), backend="numpy")(x)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)
