"""The ways past the dispatch, for a model's layers: which calls they take, and the bits of what is chosen for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.operations import OperationRegistry

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=[True, False], ids=["dot products", "without"])
def dot_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(processor, "AVX2", request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("leaf", [None, "x", "weight"])
def test_few_rows_are_those_that_linear_gives_its_operator(dot_products, dtype, biased, leaf) -> None:
    linear: Any = OperationRegistry.create("linear")
    taken = 0
    for rows in (1, 3, 8, 9, 16, 17, 40):
        for n, k in ((16, 16), (128, 128), (512, 256)):
            for matrix in (torch.randn(n, k), torch.randn(k, n).t()):
                bias = torch.randn(n).to(dtype) if biased else None
                given = {"x": torch.randn(rows, k).to(dtype), "weight": matrix.to(dtype)}
                if leaf is not None:
                    given[leaf] = given[leaf].clone().requires_grad_()
                x, weight = given["x"], given["weight"]
                product, choice = linear.few_rows(x, weight, bias), linear.choose(x, weight, bias)
                assert (product is not None) == (choice.backend == "cpu"), (rows, n, k, choice)
                if product is not None:
                    taken += 1
                    assert linear.supports("cpu", x, weight, bias) is None
                    assert torch.equal(product, linear(x, weight, bias))
    built = dot_products and leaf is None and dtype != torch.float64 and library.missing() is None
    assert bool(taken) == built


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_token_is_what_attention_chooses(dot_products, dtype, recorded, kv_heads) -> None:
    attention: Any = OperationRegistry.create("attention")
    for keys in (1, 7, 64):
        query = torch.randn(2, 4, 1, 16).to(dtype).requires_grad_(recorded)
        key, value = (torch.randn(2, kv_heads, keys, 16).to(dtype) for _ in range(2))
        heads_last = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        choice = attention.choose(*heads_last)
        cpp = dot_products and not recorded and dtype != torch.float64 and library.missing() is None
        assert (choice.backend == "cpu") == cpp and choice.implementation in ("decode", "sdpa")
        got, expected = attention.one_token(query, key, value, None), attention(*heads_last).attention_outputs
        if cpp:
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected)  # ATen's kernel folds the heads here, whatever the order of choice


def test_each_candidate_of_attention_exists() -> None:
    attention: Any = OperationRegistry.create("attention")
    for choices in attention._orders.values():
        for choice in choices:
            assert getattr(choice.operation, choice.method).backend == choice.backend


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leaf", [None, "x", "weight"])
def test_norms_in_cpp_are_those_that_rms_norm_gives_its_operator(dot_products, dtype, leaf) -> None:
    rms_norm: Any = OperationRegistry.create("rms_norm")
    taken = 0
    for width in (64, 128, 130):
        for weighted in (True, False):
            given = {"x": torch.randn(3, width).to(dtype), "weight": torch.randn(width).to(dtype) if weighted else None}
            if leaf is not None and given[leaf] is not None:
                given[leaf].requires_grad_()
            got, choice = rms_norm.try_cpp(*given.values(), 1e-5), rms_norm.choose(**given, eps=1e-5)
            recorded = any(tensor is not None and tensor.requires_grad for tensor in given.values())
            assert (got is not None) == (choice.backend == "cpu" and not recorded), (width, weighted, choice)
            if got is not None:
                taken += 1
                assert rms_norm.supports("cpu", *given.values()) is None
                assert torch.equal(got, rms_norm(*given.values(), 1e-5))
    built = dot_products and leaf != "x" and dtype != torch.float64 and library.missing() is None
    assert bool(taken) == built


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leaf", [None, 0, 2])
def test_rotations_in_cpp_are_those_that_rotary_gives_its_operator(dot_products, dtype, leaf) -> None:
    rotary: Any = OperationRegistry.create("rotary")
    for tokens, tables in ((1, 1), (5, 1), (5, 2)):
        given = [torch.randn(2, tokens, heads, 16).to(dtype) for heads in (4, 2)]
        given += [torch.randn(tables, tokens, 16).to(dtype) for _ in "cs"]
        if leaf is not None:
            given[leaf].requires_grad_()
        got, choice = rotary.try_cpp(*given), rotary.choose(*given, interleaved=False)
        assert (got is not None) == (choice.backend == "cpu")
        assert (got is not None) == (
            dot_products and leaf is None and dtype != torch.float64 and library.missing() is None
        )
        if got is not None:
            assert rotary.supports("cpu", *given) is None
            for a, b in zip(got, rotary(*given), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leaf", [None, 0, 1])
def test_gates_in_cpp_are_those_that_the_units_give_their_operator(dot_products, dtype, leaf) -> None:
    units: list[tuple[Any, tuple[str, ...]]] = [
        (OperationRegistry.create("swiglu"), ()),
        *((OperationRegistry.create("geglu"), (approximate,)) for approximate in ("none", "tanh")),
    ]
    for operation, options in units:
        taken = 0
        for width in (64, 255, 256, 300):
            given = [torch.randn(3, width).to(dtype) for _ in "gu"]
            if leaf is not None:
                given[leaf].requires_grad_()
            got, choice = operation.try_cpp(*given, *options), operation.choose(*given, *options)
            assert (got is not None) == (choice.backend == "cpu"), (width, choice)
            if got is not None:
                taken += 1
                assert operation.supports("cpu", *given, *options) is None
                assert torch.equal(got, operation(*given, *options))
        built = dot_products and leaf is None and dtype != torch.float64 and library.missing() is None
        assert bool(taken) == built


# Sizes at which the operator in C++ runs these without gradients: with them it must not, or must have them.
_RECORDED: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ((6, 256), (256,)),
    "layer_norm": ((600, 1024), (1024,), (1024,)),
    "swiglu": ((8, 512), (8, 512)),
    "geglu": ((8, 512), (8, 512)),
    "rotary": ((2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 64), (2, 5, 64)),
    "linear": ((2, 256), (512, 256), (512,)),
    "attention": ((2, 9, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64)),
    "decode": ((2, 1, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64)),
    "causal_conv1d": ((2, 9, 32), (32, 4), (32,)),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", _RECORDED)
def test_no_gradient_is_lost_where_an_operator_is_chosen(name, dtype) -> None:
    """Each tensor alone as the leaf, and all of them: the automatic choice against the definition in float64."""
    operation: Any = OperationRegistry.create(name)
    plain = [torch.randn(shape).to(dtype) for shape in _RECORDED[name]]

    def first(value: Any) -> torch.Tensor:
        for field in ("attention_outputs", "outputs"):
            value = getattr(value, field, value)
        return value[0] if isinstance(value, tuple) else value

    def gradients(call: Any, leaves: tuple[int, ...], wide: bool) -> list[torch.Tensor]:
        given = [one.double() if wide else one.clone() for one in plain]
        for place in leaves:
            given[place].requires_grad_()
        output = first(call(*given))
        assert output.requires_grad, (name, leaves)
        return list(torch.autograd.grad(output.float().square().sum(), [given[place] for place in leaves]))

    count = len(plain)
    reached = (0, 2, 3) if name == "rotary" else range(count)  # its first output has no gradient of the keys
    for leaves in [(place,) for place in reached] + [tuple(reached)]:
        found = gradients(operation, leaves, wide=False)
        expected = gradients(operation.forward_native, leaves, wide=True)
        for got, right in zip(found, expected, strict=True):
            error = (got.double() - right).norm() / right.norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), (name, leaves, float(error))
