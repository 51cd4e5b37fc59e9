"""Scores too large to stand in one number beside the logarithm of their sum: weights still add up to 1.

A row whose bias is `torch.finfo(torch.float32).min` throughout attends alike to every key, as in a softmax of its own:
any exp(score - logsumexp) of it with one float32 logsumexp would be 1. Its gradients too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.attention import logsumexp
from easytorch.kernels.cpu import library
from easytorch.kernels.decode import aten as aten_decode
from easytorch.kernels.decode import aten_split
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

LOWEST = torch.finfo(torch.float32).min
IN_CPP = pytest.param(
    "flash:cpu",
    marks=pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}"),
)
NAMES = [
    "attention", "vanilla:native", "sdpa:aten", "flash:aten", "blocksparse:aten", "blocksparse:native", "ring:native",
    pytest.param("flash:xla", marks=pytest.mark.jax_cpu), IN_CPP,
]  # fmt: skip
UNBIASED = [
    "attention",
    "sdpa:aten",
    "flash:aten",
    "blocksparse:aten",
    "ring:native",
    "ring:aten",
    pytest.param("flash:xla", marks=pytest.mark.jax_cpu),
    IN_CPP,
]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(length: int, keys: int) -> dict[str, Tensor]:
    return {"query": randn(2, length, 4, 16, seed=0), "key": randn(2, keys, 2, 16, seed=1),
            "value": randn(2, keys, 2, 16, seed=2)}  # fmt: skip


def results(name: str, tensors: dict[str, Tensor], features: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and the gradients of what is differentiable among the tensors."""
    name, _, backend = name.partition(":")
    operation = OperationRegistry.create(name, OperationMetadata(backend=backend or None))
    given = {n: x.detach().to(dtype).requires_grad_(x.requires_grad) for n, x in tensors.items()}
    output = operation(**given, **features).attention_outputs
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    grads = torch.autograd.grad(output, list(leaves.values()), randn(*output.shape, seed=7).to(dtype))
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def check(name: str, tensors: dict[str, Tensor], features: dict[str, Any]) -> None:
    got = results(name, tensors, features, torch.float32)
    for what, expected in results("vanilla:native", tensors, features, torch.float64).items():
        assert got[what].isfinite().all(), what
        error = relative_rms_error(got[what], expected)
        assert error < 2e-5, f"{what}: relative RMS error {error:.1e}"


def biased(level: float, length: int, bias_grad: bool, sinks: bool) -> dict[str, Tensor]:
    """Some rows whose bias is `level` for every key; with sinks, some of that level too."""
    tensors = {n: x.requires_grad_() for n, x in heads(length, 40).items()}
    bias = torch.where(torch.arange(length)[:, None] % 3 == 0, level, randn(1, 1, length, 40, seed=3))
    tensors["bias"] = bias.requires_grad_(bias_grad)
    if sinks:
        tensors["sinks"] = torch.tensor([0.5, level, -1.0, level]).requires_grad_()
    return tensors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [LOWEST, -1e30, 1e30])
def test_a_bias_as_large_throughout_a_row(name: str, level: float) -> None:
    for bias_grad in (False, True):
        check(name, biased(level, 35, bias_grad, sinks=False), {"causal": bias_grad})
    if name != "sdpa:aten" and level != LOWEST:  # a sink of the lowest number is no weight beside any score
        check(name, biased(level, 35, True, sinks=True), {"causal": True})


@pytest.mark.parametrize("name", ["decode:aten", "decode:native", "attention"])
@pytest.mark.parametrize("level", [LOWEST, -1e30, 1e30])
def test_of_one_query(name: str, level: float) -> None:
    for bias_grad in (False, True):
        check(name, biased(level, 1, bias_grad, sinks=False), {"causal": True})


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("factor", [1e6, 1e30])
def test_equal_products_that_are_large(name: str, factor: float) -> None:
    tensors = heads(35, 140)
    tensors["query"] = tensors["query"].round() * factor
    tensors["key"] = torch.zeros_like(tensors["key"])
    tensors["key"][..., 0] = 1.0  # its products are exact, and alike for every key of a row
    scale = 0.3  # rounded with what is subtracted at once, a product would differ from the largest of its equals
    # the gradient of the query is a sum that cancels to nothing
    given = {n: x.requires_grad_(n != "query") for n, x in tensors.items()}
    check(name, given, {"causal": True, "softmax_scale": scale})
    if name != "ring:aten":  # which refuses masks
        check(name, given, {"mask": randn(2, 1, 35, 140, seed=4) > 0.0, "softmax_scale": scale})


@pytest.mark.parametrize("hooks", ["checkpoint", "hooks"])
@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_gradients_of_what_hooks_keep(hooks: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether ATen's own gradients are exact is asked without computing a checkpoint again."""
    calls: list[int] = []
    genuine = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or genuine(*a, **k)
    )
    tensors = heads(35, 40)
    tensors["query"] = (tensors["query"].round() * factor).requires_grad_()
    tensors["key"], tensors["value"] = torch.zeros_like(tensors["key"]), tensors["value"].requires_grad_()
    tensors["key"][..., 0] = 1.0
    operation = OperationRegistry.create("sdpa")

    def attend(query: Tensor) -> Tensor:
        output: Tensor = operation(query, tensors["key"], tensors["value"], softmax_scale=0.25).attention_outputs
        return output

    if hooks == "checkpoint":
        output = checkpoint(attend, tensors["query"], use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            output = attend(tensors["query"])
    assert len(calls) == (1 if factor == 1.0 else 2)  # the second gives the logsumexps
    got = torch.autograd.grad(output, tensors["value"], randn(*output.shape, seed=7))[0]
    call = {n: x.detach().double() for n, x in tensors.items()}
    call["value"].requires_grad_()
    expected = OperationRegistry.create("vanilla")(**call, softmax_scale=0.25).attention_outputs
    want = torch.autograd.grad(expected, call["value"], randn(*output.shape, seed=7).double())[0]
    assert relative_rms_error(got, want) < 2e-5


@pytest.mark.parametrize("hooks", ["checkpoint", "hooks"])
@pytest.mark.parametrize("name", ["attention", "sdpa", "decode"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype_under_hooks(dtype: torch.dtype, name: str, hooks: str) -> None:
    tensors = {n: x.to(dtype).requires_grad_() for n, x in heads(1 if name == "decode" else 5, 40).items()}
    operation = OperationRegistry.create(name)

    def attend(*given: Tensor) -> Tensor:
        output: Tensor = operation(*given).attention_outputs
        return output

    want = torch.autograd.grad(attend(*tensors.values()).square().sum(), list(tensors.values()))
    if hooks == "checkpoint":
        output = checkpoint(attend, *tensors.values(), use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            output = attend(*tensors.values())
    got = torch.autograd.grad(output.square().sum(), list(tensors.values()))
    for one, other in zip(got, want, strict=True):
        assert relative_rms_error(one, other.double()) <= (5e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("level", [LOWEST, -1e30, 1e30])
def test_blocks_of_a_cache(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    genuine = aten_split.attend_split
    monkeypatch.setattr(aten_decode, "_LARGE", 1)
    monkeypatch.setattr(aten_decode, "_faster_split", lambda key, value: True)
    monkeypatch.setattr(aten_decode, "attend_split", lambda *given: taken.append(1) or genuine(*given))
    monkeypatch.setattr(aten_split, "_BLOCK", 12)  # 40 keys: blocks of 12, and one of 4
    tensors = {n: x.detach() for n, x in biased(level, 1, False, sinks=False).items()}
    operation = OperationRegistry.create("decode", OperationMetadata(backend="aten"))
    output = operation(**tensors).attention_outputs
    assert taken
    expected = OperationRegistry.create("decode", OperationMetadata(backend="native"))(
        **{n: x.double() for n, x in tensors.items()}
    ).attention_outputs
    assert relative_rms_error(output, expected) < 1e-5


def _rows() -> Iterator[Tensor]:
    yield torch.full((7,), LOWEST)
    yield torch.full((7,), float("-inf"))
    yield torch.tensor([1e30, 0.0, 1e30, -1e30, float("-inf"), 3.0, 1e30])
    yield randn(7, seed=0)


def test_the_two_parts() -> None:
    for row in _rows():
        parts = logsumexp.logsumexp_of(row[None])
        assert parts.isnan().sum() == 0
        weights = logsumexp.weights_of(row[None], parts)[0]
        torch.testing.assert_close(weights, torch.softmax(row, -1).nan_to_num())
