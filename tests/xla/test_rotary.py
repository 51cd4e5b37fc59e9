"""rotary on xla tensors: one node of the graph for both layouts, outputs and gradients as in float64."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.rotary.native import rotary as definition
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

rotary = OperationRegistry.create("rotary")


def tensors(rotated, dtype):
    q, k = torch.randn(2, 63, 6, 60).to(dtype), torch.randn(2, 63, 2, 60).to(dtype)
    angles = torch.rand(100, rotated // 2).repeat(1, 2) * 6
    return q, k, angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [60, 20])
def test_equals_the_definition(rotated, interleaved, dtype):
    q, k, cos, sin = tensors(rotated, dtype)
    positions = torch.randint(0, 100, (2, 63))
    on_xla = [t.to("xla").requires_grad_() for t in (q, k)]
    wide = [t.double().requires_grad_() for t in (q, k)]
    tables = cos.to("xla"), sin.to("xla")
    assert rotary.choose(*on_xla, *tables).backend == "xla"
    got = rotary(*on_xla, *tables, position_ids=positions.to("xla"), interleaved=interleaved)
    expected = definition(*wide, cos.double(), sin.double(), position_ids=positions, interleaved=interleaved)
    weights = [torch.randn_like(x).to(dtype) for x in expected]
    grads = torch.autograd.grad(got, on_xla, [w.to("xla") for w in weights])
    grads64 = torch.autograd.grad(expected, wide, [w.double() for w in weights])
    for a, b in zip((*got, *grads), (*expected, *grads64), strict=True):
        assert a.dtype == dtype
        assert relative_rms_error(a.cpu(), b) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_second_order_gradients():
    """Of a loss that the leaves are in on another way too: a lost graph would be no error there."""
    q, k, cos, sin = tensors(60, torch.float32)

    def second(call, *leaves):
        loss = sum(x.pow(3).sum() for x in call(*leaves)) + sum(x.square().sum() for x in leaves)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    tables = cos.to("xla"), sin.to("xla")
    got = second(lambda *x: rotary(*x, *tables), *(t.to("xla").requires_grad_() for t in (q, k)))
    wide = cos.double(), sin.double()
    expected = second(lambda *x: definition(*x, *wide), *(t.double().requires_grad_() for t in (q, k)))
    for a, b in zip(got, expected, strict=True):
        assert relative_rms_error(a.cpu(), b) < 1e-5


def test_one_program_and_one_gradient(count_programs):
    q, k, cos, sin = (t.to("xla") for t in tensors(60, torch.float32))
    q.requires_grad_()

    def run():
        for offset in (0, 0):
            turned = rotary(q, k, cos, sin, offset=offset)[0]  # the key's output is not used
            torch.autograd.grad(turned.square().sum(), q)[0].cpu()

    assert count_programs(run) == 1


def test_what_it_does_not_carry_is_the_definition():
    q, k, cos, sin = (t.to("xla") for t in tensors(60, torch.float32))
    assert "float64" in rotary.choose(q.double(), k.double(), cos[:63], sin[:63]).reason
    cos.requires_grad_()
    assert rotary.choose(q, k, cos, sin).backend == "native"
    assert torch.autograd.grad(rotary(q, k, cos, sin)[0].sum(), cos)[0].shape == cos.shape
