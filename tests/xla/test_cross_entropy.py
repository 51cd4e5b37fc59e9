"""The losses on xla tensors equal the CPU's, gradients included."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_losses_and_gradients(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    shapes = [(9, 30)] if name == "cross_entropy" else [(9, 8), (30, 8)]
    tensors, labels = [torch.randn(shape) for shape in shapes], torch.randint(0, 30, (9,))
    labels[2] = -100
    # a chunk smaller than the rows: what one chunk writes, the next must not lose
    options = {} if name == "cross_entropy" else {"chunk_size": 4}
    results = []
    for device in ("xla", "cpu"):
        given = [tensor.to(device).requires_grad_() for tensor in (t.clone() for t in tensors)]
        loss = OperationRegistry.create(name)(*given, labels.to(device), softcap=3.0, reduction=reduction, **options)
        results.append([tensor.cpu() for tensor in (loss.detach(), *torch.autograd.grad(loss.sum(), given))])
    for got, want in zip(*results, strict=True):
        assert relative_rms_error(got, want) <= 1e-5
