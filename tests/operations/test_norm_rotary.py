"""rms_norm and rotary against float64, transformers' modules, and their errors."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry
from easytorch.operations.check import TOLERANCE, relative_rms_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
rms_norm, rotary = OperationRegistry.create("rms_norm"), OperationRegistry.create("rotary")
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


def _rotary64(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + R / 2) as a complex number, turned by its angle."""
    half = angles.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = pairs * torch.polar(torch.ones_like(angles[..., :half]), angles[..., :half]).unsqueeze(2)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated", "batch"), [(60, 60, 1), (60, 20, 2)])
def test_rotary_and_gradients(dtype: torch.dtype, dim: int, rotated: int, batch: int) -> None:
    q = torch.randn(2, 63, 6, dim, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 63, 2, dim, dtype=dtype, requires_grad=True)
    angles = torch.rand(batch, 63, rotated // 2, dtype=torch.float64).repeat(1, 1, 2) * 6
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    got = rotary(q, k, angles.cos().float(), angles.sin().float())
    expected = [_rotary64(x, angles) for x in wide]
    weights = [torch.randn_like(x) for x in got]
    grads = torch.autograd.grad(got, (q, k), weights)
    grads64 = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    for a, b in zip((*got, *grads), (*expected, *grads64), strict=True):
        assert a.dtype == dtype
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_bit_identical_to_llama(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 9, 4, 16, dtype=dtype), torch.randn(2, 9, 2, 16, dtype=dtype)
    angles = torch.rand(2, 9, 8).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for got, want in zip(rotary(q, k, cos, sin), expected, strict=True):
        assert torch.equal(got, want.transpose(1, 2))


def test_rotary_errors() -> None:
    q, table = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8)
    for arguments in ((q, q, table, table[..., :4]), (q, q, table[:, :4], table[:, :4]), (q, q[:, :4], table, table)):
        with pytest.raises(ValueError, match="rotary takes query"):
            rotary(*arguments)
