"""Products in 16 bits computed in float32, where a CPU cannot multiply those: numbers of float64, and the choice."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from easytorch.kernels.cross_entropy import fused_linear
from easytorch.kernels.grouped_matmul import aten as grouped
from easytorch.kernels.linear import products, recorded
from easytorch.kernels.quantized_matmul import aten as quantized
from easytorch.kernels.quantized_matmul.weight import quantize
from easytorch.layers import linear as layers
from easytorch.operations import OperationMetadata, OperationRegistry

HALVES = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def widened_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDENED", frozenset(HALVES))
    monkeypatch.setattr(products, "WIDENED_PARTS", frozenset(HALVES))
    monkeypatch.setattr(recorded, "WIDENED", frozenset(HALVES))
    monkeypatch.setattr(products, "AT_ONCE", 2**13)  # several blocks, and a part of one


def once_rounded(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether every number is that of float64, summed in float32 and rounded once."""
    bound = ROUNDING[found.dtype] * expected.abs() + 1e-5 * expected.abs().max()
    return bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(9, 300, 100), (300, 9, 100), (100, 90, 1000), (64, 128, 128), (8, 257, 65)], ids=str
)
def test_numbers_of_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    x, weight, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    expected = x.double() @ weight.double().t()
    assert once_rounded(products._widened(x, weight), expected)
    assert once_rounded(products._widened(x, weight, bias), expected + bias.double())
    for a in (x, x.t().contiguous().t()):
        for b in (weight, weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :k]):
            assert once_rounded(products._widened(a, b), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_linear_of_any_rows(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(160, 128).to(dtype), torch.randn(160).to(dtype)
    for shape in ((3, 7, 128), (21, 128), (2, 2, 8, 128)):
        x = torch.randn(shape).to(dtype)
        assert products.prefers_widened(x, weight, bias)
        expected = F.linear(x.double(), weight.double(), bias.double())
        for call in (products.linear, OperationRegistry.create("linear", OperationMetadata(backend="aten"))):
            assert once_rounded(call(x, weight, bias), expected)
        layer = torch.nn.Linear(128, 160, dtype=dtype)
        layer.load_state_dict({"weight": weight, "bias": bias})
        with torch.no_grad():
            assert torch.equal(layers.linear(layer, x), products.linear(x, weight, bias))


def test_what_it_leaves_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(16, 128).bfloat16(), torch.randn(160, 128).bfloat16()
    assert products.prefers_widened(x, weight)
    others = (
        (x.float(), weight.float()), (x[:7], weight), (x, weight[:100]), (x, weight.half()), (x.to("meta"), weight),
        (x, weight.to_sparse()), (x, weight.clone().requires_grad_()), (x[:, :64], weight), (x, weight[0]),
        (x, weight, torch.zeros(160)), (x, weight, torch.zeros(1).bfloat16()), (x[:0], weight),
    )  # fmt: skip
    for given in others:
        assert not products.prefers_widened(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert not products.prefers_widened(x, weight)
    seen: list[bool] = []
    torch.func.vmap(lambda row: seen.append(products.prefers_widened(row, weight)) or row)(x.expand(2, 16, 128))
    torch.jit.trace(lambda row: seen.append(products.prefers_widened(row, weight)) or row * 1, (x,), check_trace=False)
    assert seen and not any(seen)
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        products.linear(x[:, :64], weight)
    monkeypatch.setattr(products, "WIDENED", frozenset())
    assert not products.prefers_widened(x, weight)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_training_in_sixteen_bits(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 320).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(430, 320).to(dtype))
    bias = torch.nn.Parameter(torch.randn(430).to(dtype))
    assert recorded.prefers(x, [weight])
    output, upstream = recorded.linear(x, [weight], [bias]), torch.randn(2, 40, 430).to(dtype)
    found = (output, *torch.autograd.grad(output, (x, weight, bias), upstream))
    assert once_rounded(output.detach(), F.linear(*(one.detach().double() for one in (x, weight, bias))))
    wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    exact = F.linear(*wide)
    for one, want in zip(found, (exact, *torch.autograd.grad(exact, wide, upstream.double())), strict=True):
        assert one.dtype is dtype
        assert (one.detach().double() - want).norm() <= (8e-3 if dtype is torch.bfloat16 else 1e-3) * want.norm()
    output = recorded.linear(x, [weight], [bias])
    several = torch.stack([upstream, -upstream])
    batched = torch.autograd.grad(output, (x, weight), several, is_grads_batched=True)
    for one, first in zip(batched, found[1:], strict=False):
        assert (one[0].double() - first.double()).norm() <= 1e-2 * first.double().norm()
        assert torch.equal(one[1], -one[0])


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_fused_loss(dtype: torch.dtype, chunk_size: int) -> None:
    hidden = torch.randn(48, 96).to(dtype).requires_grad_()
    weight = torch.randn(400, 96).mul(0.1).to(dtype).requires_grad_()
    labels = torch.randint(0, 400, (48,))
    loss = fused_linear.fused_linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    grads = torch.autograd.grad(loss, (hidden, weight))
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*wide), labels)
    assert abs(loss.item() - exact.item()) <= 1e-2
    for one, want in zip(grads, torch.autograd.grad(exact, wide), strict=True):
        assert (one.double() - want).norm() <= (1e-2 if dtype is torch.bfloat16 else 2e-3) * want.norm()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(60, 64).to(dtype), torch.randn(3, 64, 96).to(dtype)
    sizes = torch.tensor([40, 3, 17])
    expected = torch.cat([a @ b for a, b in zip(x.double().split([40, 3, 17]), weight.double(), strict=True)])
    found = grouped.grouped_matmul(x, weight, sizes)
    assert (found.double() - expected).norm() <= (4e-3 if dtype is torch.bfloat16 else 5e-4) * expected.norm()
    several = torch.randn(3, 96).to(dtype)
    with torch.autocast("cpu", torch.bfloat16 if dtype is torch.float16 else torch.float16):
        found = grouped.grouped_matmul(x, weight, sizes, several)
    expected += several.double().repeat_interleave(sizes, 0)
    assert once_rounded(found[:40], expected[:40])
    assert once_rounded(found[43:], expected[43:])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_quantized_weights_under_autocast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "WIDENED_PARTS", frozenset(HALVES))
    x, weight = torch.randn(40, 128).to(dtype).requires_grad_(), quantize(torch.randn(96, 128), "nf4")
    numbers = weight.dequantize(torch.float64)
    with torch.autocast("cpu", torch.bfloat16 if dtype is torch.float16 else torch.float16):
        found = quantized.quantized_matmul(x, weight)
        (grad,) = torch.autograd.grad(found, x, torch.ones_like(found))
    assert once_rounded(found.detach(), x.detach().double() @ numbers.t())
    assert once_rounded(grad, torch.ones(40, 96, dtype=torch.float64) @ numbers)
