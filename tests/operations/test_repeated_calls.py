"""Small calls like an earlier one take a shortcut, which gives what the operation gives, and only where it would."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from easytorch.kernels.rms_norm import aten as rms_aten
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.shortcuts import CALLS, LARGEST, SIZES
from easytorch.operations.rms_norm import RMSNorm

Call = tuple[tuple[Tensor, ...], dict[str, Any]]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def calls() -> dict[str, list[Call]]:
    """Operation -> calls that have a shortcut."""
    heads, one, table = draw(2, 16, 4, 8), draw(2, 1, 4, 8), draw(2, 16, 2, 8)
    return {
        "linear": [((draw(3, 8), draw(5, 8)), {}), ((draw(3, 8), draw(5, 8), draw(5)), {})],
        "rms_norm": [((draw(3, 8), draw(8)), {}), ((draw(3, 8),), {}), ((draw(3, 256), draw(256)), {})],
        "layer_norm": [((draw(3, 8), draw(8), draw(8)), {}), ((draw(3, 8),), {})],
        "swiglu": [((draw(3, 8), draw(3, 8) + 1), {})],
        "geglu": [((draw(3, 8), draw(3, 8) + 1), {})],
        "attention": [
            ((heads, heads + 1, heads - 1), {"causal": True}), ((heads, table, table + 1), {"causal": False}),
            ((one, heads, heads + 1), {}), ((one, heads, heads + 1), {"causal": True, "mask": None}),
        ],
    }  # fmt: skip


CALLS_OF = [pytest.param(name, call, id=f"{name}-{n}") for name, some in calls().items() for n, call in enumerate(some)]


def value(result: Any) -> Tensor:
    return result.attention_outputs if isinstance(result, AttentionOutput) else result


def shortened(name: str, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[], int]]:
    """The operation after two such calls, and how many shortcuts it has."""
    operation = OperationRegistry.create(name)
    for _ in range(2):
        operation(*args, **kwargs)
    return operation, lambda: sum(len(some) for known in operation._shortcuts.known for some in known.values())


@pytest.mark.parametrize(("name", "call"), CALLS_OF)
def test_it_gives_what_the_operation_gives(name: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = call
    operation, count = shortened(name, args, kwargs)
    assert count() == 1
    others = tuple(one.flip(0).clone() for one in args)
    want = value(OperationRegistry.create(name)(*others, **kwargs))
    monkeypatch.setattr(operation, "choose_freely", None, raising=False)  # nothing is chosen
    got = value(operation(*others, **kwargs))
    assert torch.equal(got, want) and got.stride() == want.stride() and count() == 1
    same = (others[0],) * len(args)
    if name in ("swiglu", "geglu"):  # the guard of several tensors takes none twice
        monkeypatch.undo()
        for _ in range(2):
            assert torch.equal(operation(*same), OperationRegistry.create(name)(*same))


@pytest.mark.parametrize(("name", "call"), CALLS_OF)
def test_gradients_are_recorded(name: str, call: Call) -> None:
    args, kwargs = call
    leaves = [one.clone().requires_grad_() for one in args]
    grads = []
    for operation in (shortened(name, tuple(leaves), kwargs)[0], OperationRegistry.create(name)):
        output = value(operation(*leaves, **kwargs))
        grads.append(torch.autograd.grad(output.square().sum(), leaves))
        with torch.no_grad():
            assert not value(operation(*leaves, **kwargs)).requires_grad
    for one, want in zip(*grads, strict=True):
        assert torch.equal(one, want)


@pytest.mark.parametrize("name", list(calls()))
def test_other_tensors_are_looked_at_again(name: str) -> None:
    args, kwargs = calls()[name][0]
    operation, _ = shortened(name, args, kwargs)
    asked: list[Any] = []
    choose = operation.choose_freely

    def noted(*given: Any) -> Any:
        asked.append(given)
        return choose(*given)

    operation.choose_freely = noted
    first = args[0]
    others = {
        "dtype": tuple(one.double() for one in args),
        "strides": (first.transpose(0, 1).contiguous().transpose(0, 1), *args[1:]),
        "negated": (torch._neg_view(-first), *args[1:]),
        "gradient": (first.clone().requires_grad_(), *args[1:]),
        "parameter": (torch.nn.Parameter(first, requires_grad=False), *args[1:]),
    }
    for case, given in others.items():
        asked.clear()
        want = value(OperationRegistry.create(name)(*given, **kwargs))
        assert torch.equal(value(operation(*given, **kwargs)), want) and asked, case
    asked.clear()
    with torch.autocast("cpu", torch.bfloat16):
        got = value(operation(*args, **kwargs))
        assert asked and got.dtype == value(OperationRegistry.create(name)(*args, **kwargs)).dtype
    asked.clear()
    with torch.inference_mode():
        assert value(operation(*args, **kwargs)).is_inference() and asked
    asked.clear()
    torch.func.vmap(lambda x: value(operation(x, *args[1:], **kwargs)))(first[None])
    assert asked
    asked.clear()
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(first, torch.ones_like(first))
        assert forward_ad.unpack_dual(value(operation(tangent, *args[1:], **kwargs))).tangent is not None and asked
    asked.clear()
    operation(*args, **kwargs)
    assert not asked


def test_attention_of_few_keys_and_unequal_lengths_takes_none() -> None:
    few, many = draw(1, 8, 2, 4), draw(1, 24, 2, 4)
    operation, count = shortened("attention", (few, few + 1, few + 2), {"causal": True})
    nan = few.clone().fill_(torch.nan)
    assert value(operation(nan, few + 1, few + 2, causal=True)).isnan().all() and count() == 0
    assert shortened("attention", (few, many, many + 1), {"causal": True})[1]() == 0


def test_settings_of_the_environment_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(3, 8)
    operation, _ = shortened("rms_norm", (x,), {})
    monkeypatch.setenv("EASYTORCH_OPS", "rms_norm=triton")
    with pytest.raises(ValueError, match="triton"):
        operation(x)
    monkeypatch.delenv("EASYTORCH_OPS")
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    monkeypatch.setattr(RMSNorm, "forward_native", lambda self, x: x + 1)
    with pytest.raises(AssertionError):
        operation(x)


def test_bad_input_is_refused_as_before() -> None:
    x, weight = draw(3, 8), draw(5, 8)
    linear, _ = shortened("linear", (x, weight), {})
    heads = draw(2, 16, 4, 8)
    attention, _ = shortened("attention", (heads, heads + 1, heads - 1), {"causal": True})
    for operation, args, kwargs in (
        (linear, (x, weight[:, :4]), {}), (linear, (x, weight.double()), {}), (linear, (x, weight, draw(4)), {}),
        (linear, (x, 3), {}), (linear, (x,), {}), (linear, (x, weight), {"other": None}),
        (attention, (heads, heads + 1, heads - 1), {"causal": "yes"}),
        (attention, (heads, heads + 1), {"causal": True}), (attention, (heads, heads + 1, heads - 1), {"cause": True}),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)) as found:
            operation(*args, **kwargs)
        with pytest.raises((ValueError, TypeError)) as expected:
            OperationRegistry.create(operation.primary_name())(*args, **kwargs)
        assert str(found.value) == str(expected.value)


def test_graphs_and_traces_hold_the_operation() -> None:
    x, weight = draw(3, 8), draw(8)
    operation, _ = shortened("rms_norm", (x, weight), {})
    want = operation(x, weight)
    assert torch.equal(torch.compile(operation, fullgraph=True, backend="eager")(x, weight), want)
    assert torch.equal(torch.jit.trace(lambda x: operation(x, weight), x)(x), want)
    module = torch.nn.Module()
    module.forward = lambda x: operation(x, weight)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), want)


def test_a_subclass_runs_what_it_overrides() -> None:
    class Doubled(RMSNorm):
        def forward_cpu(self, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
            return 2 * rms_aten.rms_norm(x, weight, eps)

    x, operation = draw(3, 8), Doubled()
    assert operation._shortcuts is None
    for _ in range(3):
        assert torch.equal(operation(x), 2 * rms_aten.rms_norm(x))


def test_copies_settings_and_how_many_are_kept() -> None:
    x = draw(3, 8)
    operation, count = shortened("rms_norm", (x,), {})
    for other in (copy.copy(operation), copy.deepcopy(operation), pickle.loads(pickle.dumps(operation))):
        assert torch.equal(other(x), operation(x))
    for metadata in (OperationMetadata(backend="aten"), OperationMetadata(runtime_dtype=torch.bfloat16)):
        assert OperationRegistry.create("rms_norm", metadata)._shortcuts is None
    for width in range(1, SIZES + 9):
        for _ in range(3):
            operation(draw(1, width))
    assert count() <= SIZES + 1
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(3):
            operation(draw(rows, 64 // rows))
    assert max(len(some) for known in operation._shortcuts.known for some in known.values()) <= CALLS
    large = draw(LARGEST // 64 + 1, 64)
    operation, count = shortened("rms_norm", (large,), {})
    assert count() == 0
