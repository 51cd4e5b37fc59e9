"""rms_norm against float64, transformers' module, and its errors."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = {name: OperationRegistry.create("rms_norm", OperationMetadata(backend=name)) for name in ("native", "aten")}


def _norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms_norm", NORMS.values(), ids=NORMS)
def test_rms_norm_and_gradients(rms_norm: OperationImpl, dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 60, dtype=dtype, requires_grad=True)
    weight = torch.randn(60, dtype=dtype, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    got, expected = rms_norm(x, weight, eps=1e-5), _norm64(*wide, eps=1e-5)
    assert got.dtype == dtype
    grad = torch.randn(3, 7, 60, dtype=dtype)
    grads = torch.autograd.grad(got, (x, weight), grad)
    grads64 = torch.autograd.grad(expected, wide, grad.double())
    for a, b in zip((got, *grads), (expected, *grads64), strict=True):
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms_norm", NORMS.values(), ids=NORMS)
def test_rms_norm_is_bit_identical_to_llama(rms_norm: OperationImpl, dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    module = llama.LlamaRMSNorm(64, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(2, 5, 64, dtype=dtype) * 20
    assert torch.equal(rms_norm(x, module.weight, 1e-6), module(x))


@pytest.mark.parametrize("name", NORMS)
def test_rms_norm_options_and_errors(name: str) -> None:
    rms_norm = NORMS[name]
    x = torch.randn(2, 8)
    torch.testing.assert_close(rms_norm(x), _norm64(x, torch.ones(8), 1e-6))
    half = OperationRegistry.create("rms_norm", OperationMetadata(runtime_dtype=torch.bfloat16, backend=name))
    assert half(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"weight must be \(8,\), got \(4,\)"):
        rms_norm(x, torch.ones(4))
    with pytest.raises(ValueError, match="floating"):
        rms_norm(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("name", [*NORMS, None])
def test_eps_counts_for_small_numbers(name: str | None, dtype: torch.dtype) -> None:
    """Numbers of about the square root of eps, where it is half of what they are divided by."""
    rms_norm = OperationRegistry.create("rms_norm", OperationMetadata(backend=name))
    numbers = torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
    for eps, given in ((1e-6, ()), (1e-3, (1e-3,)), (0.0, (0.0,))):
        x, weight = (numbers * max(eps, 1e-6) ** 0.5).to(dtype), torch.ones(60, dtype=dtype)
        expected = _norm64(x.double(), weight.double(), eps)
        for got in (rms_norm(x, weight, *given), rms_norm(x, None, *given)):
            assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
