"""`sdpa`, alias `cudnn`: layouts and broadcasts beyond the conformance suite, against the float64 definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from easytorch.kernels.attention import native
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

B, T, S, H, K, D = 2, 9, 14, 6, 2, 20
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def test_cudnn_is_sdpa():
    assert OperationRegistry.get("cudnn") is OperationRegistry.get("sdpa")
    tensor = torch.randn(B, T, H, D)
    forced = OperationRegistry.create("attention", OperationMetadata(backend="cudnn"))
    assert forced.choose(tensor, tensor, tensor).implementation == "sdpa"


# shapes of query, key, value, and what makes (batch, seq, heads, dim) of them without a copy
LAYOUTS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "expanded": (((1, T, 1, D), (1, S, 1, D), (1, S, 1, D)), lambda x: x.expand(B, -1, H, -1)),
    "heads first": (((B, H, T, D), (B, K, S, D), (B, K, S, D)), lambda x: x.transpose(1, 2)),
    "head_dim strided": (((B, T, D, H), (B, S, D, K), (B, S, D, K)), lambda x: x.transpose(2, 3)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    shapes, view = LAYOUTS[layout]
    assert_equals_the_definition([torch.randn(shape) for shape in shapes], view, dtype, causal=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(H, T, S), (1, S), (S,), (B, 1, 1, S), (H, T, 1)], ids=str)
def test_broadcast_bias_under_a_mask(shape, dtype):
    mask = torch.rand(T, S) > 0.4
    mask[3] = False
    tensors = [torch.randn(B, T, H, D), torch.randn(B, S, K, D), torch.randn(B, S, K, 12), torch.randn(shape)]
    assert_equals_the_definition(tensors, lambda x: x, dtype, mask=mask, causal=True)


def assert_equals_the_definition(tensors, view, dtype, **features):
    results = []
    grad = torch.randn(B, T, H, view(tensors[2]).shape[3])
    for attend, working in (
        (lambda *x, **f: OperationRegistry.create("sdpa")(*x, **f).attention_outputs, dtype),
        (lambda *x, **f: native.attention(*x, **f)[0], torch.float64),
    ):
        leaves = [x.to(dtype).to(working).requires_grad_() for x in tensors]
        bias = {"bias": leaves[3]} if len(leaves) > 3 else {}
        output = attend(*map(view, leaves[:3]), **bias, **features)
        results.append([output, *torch.autograd.grad(output, leaves, grad.to(dtype).to(working))])
    for got, want in zip(*results, strict=True):
        # a bias that is the same for all keys of a row has no gradient: what is left is rounding
        noise = want.abs().max() < 1e-6
        assert noise or relative_rms_error(got, want) <= TOLERANCE[dtype]
