"""The gradients of layer norm and RMS norm by the operator in C++: every instruction set this CPU has, odd sizes, any
layout, buffers with a guard page behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.norms import Norm
from easytorch.kernels.layer_norm import native as layer_native
from easytorch.kernels.rms_norm import native as rms_native
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = pytest.mark.parametrize("level", library.levels_of("layer_norm"))
NORMS: dict[str, tuple[bool, Callable[..., Tensor]]] = {
    "layer_norm": (True, layer_native.layer_norm),
    "rms_norm": (False, lambda x, weight, bias, eps: rms_native.rms_norm(x, weight, eps)),
}


def results(run: Callable[..., Tensor], given: list[Tensor | None], upstream: Tensor) -> list[Tensor]:
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given]
    output = run(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [output.detach(), *torch.autograd.grad(output, wanted, upstream.to(output.dtype))]


def tensors(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor]:
    r = torch.Generator().manual_seed(shape[-1])
    x, upstream = (torch.randn(shape, generator=r).to(dtype) for _ in "xg")
    weight, bias = (torch.randn(shape[-1:], generator=r).to(dtype) for _ in "wb")
    return [x, weight, bias if name == "layer_norm" else None], upstream


def check(name: str, got: list[Tensor], given: list[Tensor | None], upstream: Tensor, dtype: torch.dtype) -> None:
    definition = NORMS[name][1]
    wide = [None if tensor is None else tensor.double() for tensor in given]
    wanted = results(lambda *leaves: definition(*leaves, 1e-5), wide, upstream.double())
    for result, want in zip(got, wanted, strict=True):
        assert result.shape == want.shape and result.dtype == dtype
        assert relative_rms_error(result, want) <= TOLERANCE[dtype]


@LEVELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_gradient_at_every_level(name: str, dtype: torch.dtype, level: int) -> None:
    centered = NORMS[name][0]
    for shape in ((5, 7), (2, 3, 60), (17, 129), (600, 33), (1, 1000)):
        given, upstream = tensors(name, shape, dtype)
        buffers = [None if tensor is None else guarded(tensor) for tensor in given]
        got = results(lambda *leaves: Norm.apply(*leaves, 1e-5, centered, level), buffers, guarded(upstream))
        check(name, got, given, upstream, dtype)


@pytest.mark.parametrize("name", NORMS)
def test_any_layout_and_vectors_that_are_absent_or_wider(name: str) -> None:
    centered, definition = NORMS[name]
    given, upstream = tensors(name, (6, 4, 40), torch.bfloat16)
    x, weight, bias = given
    assert x is not None and weight is not None
    for rows in (x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, torch._neg_view(-x)):
        for up in (upstream, upstream[:1, :1].expand(6, 4, 40), upstream.mT.contiguous().mT):
            got = results(lambda *leaves: Norm.apply(*leaves, 1e-5, centered, library.BEST), [rows, weight, bias], up)
            check(name, got, given, up, torch.bfloat16)
    got = results(lambda x: Norm.apply(x, None, None, 1e-5, centered, library.BEST), [x], upstream)
    want = results(lambda x: definition(x, None, None, 1e-5), [x.double()], upstream.double())
    assert all(relative_rms_error(a, b) <= TOLERANCE[torch.bfloat16] for a, b in zip(got, want, strict=True))
    if name == "layer_norm":
        mixed = [x, weight.float(), bias.float() if bias is not None else None]
        got = results(lambda *leaves: Norm.apply(*leaves, 1e-5, True, library.BEST), mixed, upstream)
        assert [grad.dtype for grad in got[1:]] == [torch.bfloat16, torch.float32, torch.float32]
        want = results(
            lambda *leaves: definition(*leaves, 1e-5), [t.double() for t in mixed if t is not None], upstream.double()
        )
        assert all(relative_rms_error(a, b) <= TOLERANCE[torch.bfloat16] for a, b in zip(got, want, strict=True))


def test_sums_over_many_rows_are_float32() -> None:
    """ATen's, in bfloat16, are 5% off at 4096 rows."""
    given, upstream = tensors("layer_norm", (4096, 64), torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in given if tensor is not None]
    output = OperationRegistry.create("layer_norm", OperationMetadata(backend="cpu"))(*leaves)
    got = torch.autograd.grad(output, leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(layer_native.layer_norm(*wide), wide, upstream.double())
    for a, b in zip(got, want, strict=True):
        assert relative_rms_error(a, b) <= 3e-3


def test_several_threads_give_the_bits_of_one_and_second_derivatives_are_the_definitions() -> None:
    given, upstream = tensors("layer_norm", (700, 129), torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(results(lambda *leaves: Norm.apply(*leaves, 1e-5, True, library.BEST), given, upstream))
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)
    for name, (centered, _) in NORMS.items():
        given, _ = tensors(name, (3, 5), torch.float32)
        leaves = [tensor.requires_grad_() for tensor in given if tensor is not None]

        def second(run: Callable[..., Tensor], leaves: list[Tensor] = leaves) -> tuple[Tensor, ...]:
            grads = torch.autograd.grad(run(*leaves).pow(3).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)

        def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None, centered: bool = centered) -> Tensor:
            return Norm.apply(x, weight, bias, 1e-5, centered, library.BEST)

        def defined(x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str = name) -> Tensor:
            return NORMS[name][1](x, weight, bias, 1e-5)

        for a, b in zip(second(ours), second(defined), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    operation: Any = OperationRegistry.create("layer_norm")
    x, vector = torch.ones(9, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    assert operation.choose(x, vector, vector).backend == "cpu"
    assert operation.choose(x, vector).backend == "cpu"
    with torch.no_grad():
        assert operation.choose(x, vector).backend == "aten"
    assert operation.choose(x.requires_grad_(), vector.detach()).backend == "aten"
    assert operation.choose(x[:4], vector).backend == "aten"
    assert operation.choose(x.float(), vector).backend == "aten"
    assert operation.choose(x, vector.half()).backend == "aten"
    forced = OperationRegistry.create("layer_norm", OperationMetadata(backend="cpu"))
    with pytest.raises(UnsupportedOperationError, match="float64"):
        forced(x.double(), vector)
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(x, vector).backend == "aten"


def test_the_operator_refuses_what_does_not_fit() -> None:
    x, weight, none = torch.ones(3, 8), torch.ones(8), torch.empty(0)
    for given, why in (
        ((x[:2], x, weight, none), "do not fit"), ((x.half(), x, weight, none), "do not fit"),
        ((x, x, weight[:7], none), "weight is"), ((x.t().contiguous().t(), x, weight, none), "must be contiguous"),
        ((x, x.double(), weight, none), "takes x"), ((x, x, weight.double(), none), "weight is"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.norm_backward.default(*given, 1e-5, True, 3)
