"""The fused linear cross entropy in torch: what it holds in memory, its operators, its chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from easytorch.kernels.cross_entropy import fused_linear, native
from easytorch.kernels.cross_entropy.chunk import Settings, step
from easytorch.kernels.cross_entropy.fused_linear import default_chunk_size, fused_linear_cross_entropy


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_weight(dtype: torch.dtype, softcap: float | None) -> None:
    hidden, weight = torch.randn(1000, 8, dtype=dtype), torch.randn(64, 8, dtype=dtype)
    labels = torch.randint(0, 64, (1000,))
    with Largest() as largest:
        fused_linear.over_chunks(
            hidden, weight, None, labels, torch.ones(1000), Settings(-100, 0.1, softcap, 0.1), 16, step, [True] * 3
        )
    assert largest.elements <= max(hidden.numel(), 16 * 64)
    with Largest() as largest:
        native.linear_cross_entropy(hidden, weight, labels)
    assert largest.elements >= 1000 * 64  # the measure sees them where they are


def test_the_chunk_is_bounded_in_logits() -> None:
    for vocabulary in (2, 1000, 32000, 128256, 2**26):
        rows = default_chunk_size(vocabulary, torch.device("cuda"))
        assert rows >= 1 and rows & (rows - 1) == 0
        assert rows == 1 or rows * vocabulary <= fused_linear.LOGITS_AT_ONCE < 2 * rows * vocabulary
        fewer = default_chunk_size(vocabulary, torch.device("cpu"))
        assert fewer <= rows and (fewer == rows or fewer >= fused_linear.ROWS_ON_CPU)
        assert fewer * vocabulary <= fused_linear.LOGITS_ON_CPU or fewer <= fused_linear.ROWS_ON_CPU


def test_the_result_does_not_depend_on_the_chunks() -> None:
    hidden, weight = torch.randn(20, 8).requires_grad_(), torch.randn(30, 8).requires_grad_()
    labels = torch.randint(0, 30, (20,))
    results = []
    for size in (1, 7, 20, 100, None):
        loss = fused_linear_cross_entropy(hidden, weight, labels, chunk_size=size)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_float16_gradients_survive_a_loss_scale() -> None:
    """The mean's 1 / N is applied after the upstream gradient: applied before it, these would be zeros in float16."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape).mul(0.01).half().requires_grad_() for shape in ((4096, 4), (32, 4)))
    labels = torch.randint(0, 32, (4096,))
    grads = torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, labels) * 2.0**14, (hidden, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(native.linear_cross_entropy(*wide, labels) * 2.0**14, wide)
    for got, want in zip(grads, expected, strict=True):
        assert (got - want).square().mean().sqrt() <= 1e-3 * want.square().mean().sqrt()


def test_a_graph_that_is_kept_gives_the_same_gradients_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pass over a graph scales the gradients in place, the others must not."""
    monkeypatch.setattr(fused_linear, "SMALL", 0)
    hidden, weight = torch.randn(9, 8).requires_grad_(), torch.randn(30, 8).requires_grad_()
    loss = fused_linear_cross_entropy(hidden, weight, torch.randint(0, 30, (9,))) * 3.0
    passes = [torch.autograd.grad(loss, (hidden, weight), retain_graph=number < 2) for number in range(3)]
    for again in passes[1:]:
        torch.testing.assert_close(again, passes[0], rtol=0, atol=0)


def test_under_autocast_the_weight_is_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "SMALL", 0)
    hidden, weight = torch.randn(40, 16).requires_grad_(), torch.randn(30, 16).requires_grad_()
    labels = torch.randint(0, 30, (40,))
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        settings, ones = Settings(-100, 0.0, None, 0.0), torch.ones(40)
        fused_linear.over_chunks(hidden, weight, None, labels, ones, settings, 8, step, [True, True, False])
    assert casts.of[30, 16] == 1
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, labels, chunk_size=8)
    found = torch.autograd.grad(loss, (hidden, weight))
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    expected = torch.autograd.grad(native.linear_cross_entropy(*wide, labels), wide)
    for one, want in zip(found, expected, strict=True):
        assert one.dtype is torch.float32 and (one - want).norm() <= 8e-3 * want.norm()


class Casts(TorchDispatchMode):
    """How often a tensor of each shape is cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.of[tuple(result.shape)] += 1
        return result


def test_only_the_gradients_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = torch.randn(5, 8), torch.randn(30, 8), torch.randint(0, 30, (5,))
    seen: list[list[bool]] = []
    whole = fused_linear.over_chunks
    monkeypatch.setattr(fused_linear, "SMALL", 0)
    monkeypatch.setattr(fused_linear, "over_chunks", lambda *args: (seen.append(args[8]), whole(*args))[1])
    fused_linear_cross_entropy(hidden, weight, labels)
    fused_linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    with torch.no_grad():
        fused_linear_cross_entropy(hidden, weight, labels)
    fused_linear_cross_entropy(hidden, weight.requires_grad_(), labels, reduction="none").sum().backward()
    nothing, both = [False, False, False], [True, True, False]
    assert seen == [nothing, [True, False, False], nothing, nothing, both]


@pytest.mark.parametrize("reduction", native.REDUCTIONS)
def test_opcheck_and_one_graph(reduction: str) -> None:
    hidden, weight, bias = (torch.randn(shape).requires_grad_() for shape in ((5, 8), (30, 8), (30,)))
    labels = torch.randint(0, 30, (5,))

    def step(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fused_linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction, chunk_size=2).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, bias)
    expected = step(hidden, weight, bias)
    torch.testing.assert_close(compiled, expected)
    leaves = (hidden, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(expected, leaves))
    if reduction == "none":
        operator, wanted = torch.ops.easytorch.fused_linear_cross_entropy.default, ()
    else:
        operator, wanted = torch.ops.easytorch.fused_linear_cross_entropy_sum.default, (False, [True, True, True])
    torch.library.opcheck(operator, (hidden, weight, bias, labels, -100, 0.1, 3.0, 0.1, 2, "torch", *wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_chunk_needs_no_wide_gradient_of_the_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(63, 60).to(dtype).requires_grad_(), torch.randn(40, 60).to(dtype).requires_grad_()
    labels, bias = torch.randint(0, 40, (63,)), torch.zeros(40, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, labels), wide)
    for chunk_size in (None, 63, 10):
        got = torch.autograd.grad(
            fused_linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size), (hidden, weight)
        )
        for a, b in zip(got, want, strict=True):
            allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
            assert a.dtype == dtype and (a.double() - b).norm() <= allowed * b.norm()
    operator = torch.ops.easytorch.fused_linear_cross_entropy_sum.default
    settings = (-100, 0.0, None, 0.0, 64, "torch", True, [True, True, True])
    torch.library.opcheck(operator, (hidden, weight, bias, labels, *settings))


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
@pytest.mark.parametrize("reduction", native.REDUCTIONS)
def test_second_gradients_are_right_or_an_error(reduction: str, frozen: str) -> None:
    """The leaves are in the last sum too: a first gradient that has lost its graph would only be missing from it."""
    tensors = {
        name: torch.randn(shape, dtype=torch.float64).requires_grad_(name != frozen)
        for name, shape in {"hidden": (5, 8), "weight": (16, 8), "bias": (16,)}.items()
    }
    leaves = [x for x in tensors.values() if x.requires_grad]
    settings = {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.3, "reduction": reduction, "ignore_index": 3}

    def second(function: Any, **chunks: int) -> tuple[torch.Tensor, ...]:
        loss = function(**tensors, labels=torch.arange(5), **settings, **chunks)
        first = torch.autograd.grad(loss.square().sum(), leaves, create_graph=True)
        return (*first, *torch.autograd.grad(sum(x.square().sum() for x in (*first, *leaves)), leaves))

    expected = second(native.linear_cross_entropy)
    if reduction == "none":
        with pytest.raises(RuntimeError, match="no autograd formula"):
            second(fused_linear_cross_entropy, chunk_size=2)
        return
    for got, want in zip(second(fused_linear_cross_entropy, chunk_size=2), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recorded", [(False, False), (True, False), (True, True)], ids=str)
def test_an_exported_loss_has_any_gradient_it_is_asked_for(recorded: tuple[bool, bool]) -> None:
    """Which leaves recorded a gradient while it was exported says nothing of the program that runs."""

    class Loss(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return fused_linear_cross_entropy(hidden, weight, labels, chunk_size=2)

    hidden, weight, labels = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    example = tuple(x.clone().requires_grad_(on) for x, on in zip((hidden, weight), recorded, strict=True))
    program = torch.export.export(Loss(), (*example, labels)).module()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    for wanted in (leaves, leaves[1:]):
        got = torch.autograd.grad(program(*leaves, labels), wanted)
        expected = torch.autograd.grad(Loss()(*leaves, labels), wanted)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_allocates_the_gradients_in_their_dtype_alone(dtype):
    """Zeros for the outputs without a gradient, and a product in float32 beside the sum, were the peak of a step."""
    hidden = torch.randn(600, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(5000, 32, dtype=dtype, requires_grad=True)
    loss = fused_linear_cross_entropy(hidden, weight, torch.randint(5000, (600,)), chunk_size=256)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        torch.autograd.grad(loss, (hidden, weight))
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    narrowed = 0 if dtype == torch.float32 else hidden.nbytes + weight.nbytes
    assert sum(size for size in sizes if size > 0) <= narrowed + 4096


@pytest.mark.parametrize("chunk_size", [3, 100], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_several_outputs_at_once(reduction: str, chunk_size: int) -> None:
    """`is_grads_batched`: the kept gradients are not multiplied in place by a batch of factors."""
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((10, 8), (17, 8), (17,)))
    labels = torch.randint(0, 17, (10,))

    def gradients(upstream: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, ...]:
        loss = fused_linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction, chunk_size=chunk_size)
        return torch.autograd.grad(loss, (hidden, weight, bias), upstream, **settings)

    upstream = torch.randn(3, *(labels.shape if reduction == "none" else ()))
    expected = [torch.stack(parts) for parts in zip(*map(gradients, upstream), strict=True)]
    torch.testing.assert_close(list(gradients(upstream, is_grads_batched=True)), expected)
