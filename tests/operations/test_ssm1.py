"""ssm1 against transformers' scan of Mamba, and the memory of its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from easytorch.kernels.ssm1.scan import Scan
from easytorch.operations import OperationMetadata, OperationRegistry


def ssm1(backend: str | None = None):
    return OperationRegistry.create("ssm1", OperationMetadata(backend=backend))


@pytest.mark.parametrize("forced", [None, "native"])
def test_is_the_scan_of_transformers(forced: str | None) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    x, dt, z = torch.randn(3, 2, 63, 24).unbind(0)
    A, B, C, D = -torch.rand(24, 5) * 4, torch.randn(2, 63, 5), torch.randn(2, 63, 5), torch.randn(24)
    bias = torch.randn(24)
    first = [tensor.transpose(1, 2) for tensor in (x, dt)]
    outputs, state = modeling.mamba_selective_scan(
        *first, A, B.transpose(1, 2), C.transpose(1, 2), D, z.transpose(1, 2), bias, True, return_last_state=True
    )
    result = ssm1(forced)(x, dt, A, B, C, D, z, bias, True)
    torch.testing.assert_close(result.outputs, outputs.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.final_state, state, rtol=1e-4, atol=1e-5)


def test_passes_opcheck() -> None:
    step, x = torch.rand(2, 9, 6, requires_grad=True), torch.randn(2, 9, 6, requires_grad=True)
    A, B = -torch.rand(1, 3, 6).requires_grad_(), torch.randn(2, 9, 3, requires_grad=True)
    state, first = torch.randn(2, 3, 6, requires_grad=True), torch.rand(2, 9) < 0.2
    for forgotten in (None, first):
        torch.library.opcheck(torch.ops.easytorch.ssm1_scan.default, (step, x, A, B, B, state, forgotten))


@pytest.mark.parametrize("batched", ["A", "first", "all"])
def test_vmap_over_what_is_shared(batched: str) -> None:
    torch.manual_seed(0)
    step, x, A, B = torch.rand(2, 9, 6), torch.randn(2, 9, 6), -torch.rand(1, 3, 6), torch.randn(2, 9, 3)
    given = {"step": step, "x": x, "A": A, "B": B, "C": B, "state": torch.randn(2, 3, 6), "first": step[..., 0] > 0.8}
    many = {n: torch.stack([v, v.flip(0) if v.dtype == torch.bool else 0.5 * v]) for n, v in given.items()}
    dims = {n: 0 if batched in (n, "all") else None for n in given}
    mixed = {n: many[n] if dims[n] == 0 else v for n, v in given.items()}

    def loss(given, A):
        outputs, last, _ = Scan.apply(*{**given, "A": A}.values())
        return outputs.square().sum() + last.sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(dims, dims["A"]))(mixed, mixed["A"])
    for i in range(2):
        one = {n: v[i] if dims[n] == 0 else v for n, v in mixed.items()}
        torch.testing.assert_close(got[i], torch.func.grad(loss, argnums=1)(one, one["A"]))


def test_the_gradient_keeps_one_state_in_64() -> None:
    batch, length, channels, size = 1, 256, 128, 16
    x = torch.randn(batch, length, channels, requires_grad=True)
    A, B = -torch.rand(channels, size), torch.randn(batch, length, size)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ssm1()(x, x.detach().abs(), A, B, B)
    assert 0 < kept < length * channels * size // 4


def test_wide_channels_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.kernels.ssm1 import scan

    x, A, B = torch.randn(1, 70, 200), -torch.rand(200, 3), torch.randn(1, 70, 3)
    leaf = x.requires_grad_()
    whole = ssm1()(leaf, x.abs(), A, B, B).outputs
    grad = torch.autograd.grad(whole.square().sum(), leaf)
    monkeypatch.setattr(scan, "BLOCK", 64)
    cut = ssm1()(leaf, x.abs(), A, B, B).outputs
    torch.testing.assert_close(cut, whole)
    found = torch.autograd.grad(cut.square().sum(), leaf)
    torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-6 * grad[0].abs().max().item())


@pytest.mark.parametrize("forced", [None, "native"])
def test_errors(forced: str | None) -> None:
    x, A, B = torch.randn(2, 5, 8), torch.ones(8, 3), torch.ones(2, 5, 3)
    with pytest.raises(ValueError, match=r"A must be \(8, N\), got \(4, 3\)"):
        ssm1(forced)(x, x, torch.ones(4, 3), B, B)
    with pytest.raises(ValueError, match=r"C must be \(2, 5, 3\), got \(2, 5, 4\)"):
        ssm1(forced)(x, x, A, B, torch.ones(2, 5, 4))
    with pytest.raises(ValueError, match=r"D must be \(8,\), got \(3,\)"):
        ssm1(forced)(x, x, A, B, B, torch.ones(3))


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("forced", ["native", "aten"])
def test_one_token_by_hand(forced: str, softplus: bool) -> None:
    x, dt, decay = torch.tensor([[[3.0]]]), torch.tensor([[[0.5]]]), torch.tensor([[-2.0]])
    write, read, state = torch.tensor([[[5.0]]]), torch.tensor([[[7.0]]]), torch.tensor([[[11.0]]])
    run = OperationRegistry.create("ssm1", OperationMetadata(backend=forced))
    result = run(x, dt, decay, write, read, dt_softplus=softplus, initial_state=state)
    step = math.log1p(math.exp(0.5)) if softplus else 0.5
    wanted = math.exp(-2.0 * step) * 11.0 + step * 3.0 * 5.0
    assert result.final_state.item() == pytest.approx(wanted, rel=1e-6)
    assert result.outputs.item() == pytest.approx(7.0 * wanted, rel=1e-6)
