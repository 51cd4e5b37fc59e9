"""Small calls like an earlier one take a shortcut, which gives what the operation gives, and only where it would.

Each test runs twice: with shortcuts that C++ finds, and that Python finds.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from easytorch.kernels.cpu import library as cpu_library
from easytorch.kernels.repeated import library as repeated_library
from easytorch.kernels.rms_norm import aten as rms_aten
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch import impl
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.shortcuts import CALLS, LARGEST, PATIENCE, REST, SIZES
from easytorch.operations.rms_norm import RMSNorm

Call = tuple[tuple[Tensor, ...], dict[str, Any]]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def calls() -> dict[str, list[Call]]:
    """Operation -> calls that have a shortcut."""
    heads, one, table = draw(2, 16, 4, 8), draw(2, 1, 4, 8), draw(2, 16, 2, 8)
    return {
        "linear": [((draw(3, 8), draw(5, 8)), {}), ((draw(3, 8), draw(5, 8), draw(5)), {})],
        "rms_norm": [
            ((draw(3, 8), draw(8)), {}), ((draw(3, 8),), {}), ((draw(3, 256), draw(256)), {}),
            ((draw(3, 8), draw(8), 0.5), {}), ((draw(3, 8), None), {"eps": 0.5}), ((draw(3, 256),), {"eps": 0.5}),
        ],
        "layer_norm": [
            ((draw(3, 8), draw(8), draw(8)), {}), ((draw(3, 8),), {}), ((draw(3, 8), draw(8), None, 0.5), {}),
            ((draw(3, 8),), {"eps": 0.5, "weight": None}),
        ],
        "swiglu": [((draw(3, 8), draw(3, 8) + 1), {})],
        "geglu": [
            ((draw(3, 8), draw(3, 8) + 1), {}), ((draw(3, 8), draw(3, 8) + 1, "tanh"), {}),
            ((draw(3, 8), draw(3, 8) + 1), {"approximate": "tanh"}),
        ],
        "attention": [
            ((heads, heads + 1, heads - 1), {"causal": True}), ((heads, table, table + 1), {"causal": False}),
            ((one, heads, heads + 1), {}), ((one, heads, heads + 1), {"causal": True, "mask": None}),
            ((heads, heads + 1, heads - 1), {"softmax_scale": 0.7, "dropout_prob": 0.0, "seed": None}),
            ((one, heads, heads + 1), {"softmax_scale": 0.7, "causal": True}),
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
    return operation, lambda: sum(map(len, operation._shortcuts.known.values()))


@pytest.fixture(params=["cpp", "python"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where shortcuts are looked for first."""
    cpu_library.missing()
    if request.param == "python":
        monkeypatch.setattr(repeated_library, "_module", None)
    elif repeated_library.module() is None:
        pytest.skip(repeated_library.described())
    return str(request.param)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each call that is chosen, not shortened."""
    found: list[Any] = []
    platform_of = impl.platform_of

    def noted(*given: Any) -> str:
        found.append(given)
        return platform_of(*given)

    monkeypatch.setattr(impl, "platform_of", noted)
    return found


def leaf(one: Any) -> Any:
    return one.clone().requires_grad_() if isinstance(one, Tensor) else one


@pytest.mark.parametrize(("name", "call"), CALLS_OF)
def test_it_gives_what_the_operation_gives(name: str, call: Call, asked: list[Any], where: str) -> None:
    args, kwargs = call
    operation, count = shortened(name, args, kwargs)
    assert count() == 1 and (operation._shortcuts.in_cpp is not None) == (where == "cpp")
    others = tuple(one.flip(0).clone() if isinstance(one, Tensor) else one for one in args)
    want = value(OperationRegistry.create(name)(*others, **kwargs))
    asked.clear()
    got = value(operation(*others, **kwargs))
    assert torch.equal(got, want) and got.stride() == want.stride() and count() == 1 and not asked
    assert where == "python" or operation._shortcuts.in_cpp.found == 1
    same = (others[0],) * 2
    if name in ("swiglu", "geglu"):  # the guard of several tensors takes none twice
        for _ in range(2):
            assert torch.equal(operation(*same), OperationRegistry.create(name)(*same))


@pytest.mark.parametrize(("name", "call"), CALLS_OF)
def test_gradients_are_recorded(name: str, call: Call) -> None:
    args, kwargs = call
    given = [leaf(one) for one in args]
    leaves = [one for one in given if isinstance(one, Tensor)]
    grads = []
    for operation in (shortened(name, tuple(given), kwargs)[0], OperationRegistry.create(name)):
        output = value(operation(*given, **kwargs))
        grads.append(torch.autograd.grad(output.square().sum(), leaves))
        with torch.no_grad():
            assert not value(operation(*given, **kwargs)).requires_grad
    for one, want in zip(*grads, strict=True):
        assert torch.equal(one, want)


@pytest.mark.parametrize("name", list(calls()))
def test_other_tensors_are_looked_at_again(name: str, asked: list[Any]) -> None:
    args, kwargs = calls()[name][0]
    operation, _ = shortened(name, args, kwargs)
    first = args[0]
    others = {
        "dtype": tuple(one.double() for one in args),
        "strides": (first.transpose(0, 1).contiguous().transpose(0, 1), *args[1:]),
        "negated": (torch._neg_view(-first), *args[1:]),
        "gradient": (first.clone().requires_grad_(), *args[1:]),
        "parameter": (torch.nn.Parameter(first, requires_grad=False), *args[1:]),
    }
    for case, given in others.items():
        want = value(OperationRegistry.create(name)(*given, **kwargs))
        asked.clear()
        assert torch.equal(value(operation(*given, **kwargs)), want) and asked, case
    asked.clear()
    with torch.autocast("cpu", torch.bfloat16):
        got = value(operation(*args, **kwargs))
        assert asked
        assert got.dtype == value(OperationRegistry.create(name)(*args, **kwargs)).dtype
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


def test_other_settings_are_looked_at_again(asked: list[Any]) -> None:
    x, weight = draw(3, 8), draw(8)
    operation, _ = shortened("rms_norm", (x, weight, 0.5), {})
    for args, kwargs in (
        ((x, weight, 0.25), {}), ((x, weight), {}), ((x, weight), {"eps": 0.5}), ((x, weight, np.float64(0.5)), {}),
        ((x, weight), {"eps": np.float64(0.5)}), ((x, None, 0.5), {}),
    ):  # fmt: skip
        asked.clear()
        got = operation(*args, **kwargs)
        assert asked and torch.equal(got, OperationRegistry.create("rms_norm")(*args, **kwargs)), args
    operation, _ = shortened("rms_norm", (x, weight, 1), {})
    with pytest.raises(TypeError, match="eps"):
        operation(x, weight, True)
    with pytest.raises(ValueError, match="eps"):
        operation(x, weight, float("nan"))
    geglu, _ = shortened("geglu", (x, x + 1, "tanh"), {})
    with pytest.raises(ValueError, match="approximate"):
        geglu(x, x + 1, "sigmoid")
    heads = draw(2, 16, 4, 8)
    for refused in ({"softcap": 5.0}, {"sliding_window": 3}, {"dropout_prob": 0.5}, {"softmax_scale": -0.5}):
        assert shortened("attention", (heads, heads + 1, heads - 1), refused)[1]() == 0, refused


def test_a_subclass_with_a_call_and_a_shortcut_of_its_own_is_called() -> None:
    seen = []

    class Counted(RMSNorm):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(args)
            return super().__call__(*args, **kwargs)

        def shortcut(self, choice: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
            return super().shortcut(choice, args, kwargs)

    class Inherits(Counted):
        pass

    for operation in (Counted(), Inherits()):
        seen.clear()
        for _ in range(6):
            operation(draw(3, 8))
        assert len(seen) == 6 and operation._shortcuts.known


@pytest.mark.parametrize(
    ("module", "function", "name", "call"),
    [
        pytest.param(F, "linear", "linear", calls()["linear"][1], id="linear"),
        pytest.param(F, "gelu", "geglu", calls()["geglu"][1], id="geglu"),
        pytest.param(F, "scaled_dot_product_attention", "attention", calls()["attention"][0], id="attention"),
        pytest.param(torch, "rms_norm", "rms_norm", calls()["rms_norm"][0], id="rms_norm"),
        pytest.param(torch, "layer_norm", "layer_norm", calls()["layer_norm"][0], id="layer_norm"),
    ],
)
@torch.no_grad()
def test_a_function_of_torch_that_is_replaced_is_called(
    module: Any, function: str, name: str, call: Call, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by torch's context parallelism, which puts its own in the place of `scaled_dot_product_attention`."""
    args, kwargs = call
    kept, seen = getattr(module, function), []

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(given)
        return kept(*given, **named)

    before, _ = shortened(name, args, kwargs)
    before(*args, **kwargs)
    with monkeypatch.context() as patched:
        patched.setattr(module, function, noted)
        during, _ = shortened(name, args, kwargs)
        for operation in (before, during):
            seen.clear()
            for _ in range(3):
                operation(*args, **kwargs)
            assert len(seen) == 3
    seen.clear()
    for operation in (before, during):
        known = operation._shortcuts.in_cpp
        count = known.found if where == "cpp" else 0
        operation(*args, **kwargs)
        assert not seen and (where == "python" or known.found == count + 1)


def replaced(*args: Any, **kwargs: Any) -> Any:
    return "replaced"


PATCHES = [
    pytest.param("rms_norm", (draw(3, 8), draw(8)), name, id=f"rms_norm-{name}")
    for name in ("forward_cpu", "choose_freely", "check_call", "candidates", "run", "supports")
] + [
    pytest.param("rms_norm", (draw(3, 256), draw(256)), "run_cpp", id="rms_norm-run_cpp"),
    pytest.param("linear", (draw(3, 8), draw(5, 8)), "forward_gpu", id="linear-forward_gpu"),
]


@pytest.mark.parametrize(("name", "args", "method"), PATCHES)
@pytest.mark.parametrize("holder", ["instance", "class", "base"])
def test_a_method_replaced_later_is_called(
    name: str, args: tuple[Tensor, ...], method: str, holder: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, count = shortened(name, args, {})
    want, cls = operation(*args), type(operation)
    seen: list[str] = []
    kept = getattr(operation if holder == "instance" else cls, method)

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(method)
        return kept(*given, **named)

    base = next(one for one in cls.__mro__ if method in vars(one))
    target = {"instance": operation, "class": cls, "base": base}[holder]
    if holder == "base" and base.__module__.endswith("impl"):  # seen by each operation, as its own would be
        kept = getattr(base, method)
    with monkeypatch.context() as patched:
        patched.setattr(target, method, noted)
        asked.clear()
        for _ in range(CALLS + 2):
            assert torch.equal(operation(*args), want)
        # each time, as by an operation that has no shortcuts; `supports` and `run` are not of every call
        other = OperationRegistry.create(name)
        if holder == "instance":
            setattr(other, method, noted)
        other._shortcuts = None
        calls_of_each = len(seen)
        for _ in range(CALLS + 2):
            other(*args)
        assert len(asked) == 2 * (CALLS + 2) and len(seen) == 2 * calls_of_each and count() == 0
    for _ in range(2):
        operation(*args)
    asked.clear()
    assert torch.equal(operation(*args), want) and not asked and count() == 1  # put back, it is as before


def test_a_method_replaced_of_what_attention_calls_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = draw(2, 16, 4, 8)
    args = (heads, heads + 1, heads - 1)
    operation, _ = shortened("attention", args, {})
    sdpa = operation.implementations["sdpa"]
    for target in (sdpa, type(sdpa)):
        with monkeypatch.context() as patched:
            patched.setattr(target, "forward_cpu", replaced)
            assert [operation(*args) for _ in range(CALLS)] == ["replaced"] * CALLS
        assert operation(*args) != "replaced"


def test_a_class_made_while_its_base_is_patched_and_one_of_a_mixin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixin:
        pass

    class Mixed(Mixin, RMSNorm):
        pass

    x = draw(3, 8)
    assert Mixed()._shortcuts is None
    with monkeypatch.context() as patched:
        patched.setattr(RMSNorm, "forward_cpu", replaced)

        class Later(RMSNorm):
            pass

        operation = Later()
        assert [operation(x) for _ in range(CALLS)] == ["replaced"] * CALLS
    with monkeypatch.context() as patched:
        patched.setattr(RMSNorm, "added", replaced, raising=False)
        operation, count = shortened("rms_norm", (x,), {})
        assert count() == 0


def test_a_metaclass_of_its_own_changes_no_class() -> None:
    operation = OperationRegistry.create("rms_norm")
    assert isinstance(operation, OperationImpl) and not RMSNorm.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        OperationImpl()  # type: ignore[abstract]
    RMSNorm.note = 3  # type: ignore[attr-defined]
    assert RMSNorm.note == 3  # type: ignore[attr-defined]
    del RMSNorm.note  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        del RMSNorm.note  # type: ignore[attr-defined]


def test_sizes_that_never_come_back_are_not_looked_for() -> None:
    cache, query = draw(1, 900, 2, 8), draw(1, 1, 2, 8)
    operation = OperationRegistry.create("attention")
    found = operation._shortcuts

    def decode(keys: int) -> None:
        operation(query, cache[:, :keys], cache[:, :keys], causal=True)

    for keys in range(16, 16 + PATIENCE):
        assert not found.resting
        decode(keys)
    assert found.resting == REST and not found.known and not found._asked
    for keys in range(800):
        decode(16 + keys)
    assert found.resting == REST - 800 and not found.known
    found.resting = 0
    for keys in range(2 * PATIENCE):  # one that is found again and again is kept beside others that are not
        decode(20)
        decode(16 + keys)
    assert not found.resting and len(found.known) >= 1 and found.missed <= 1
    found.forget()
    for keys in range(16, 200):  # as by three layers
        for _ in range(3):
            decode(keys)
        assert len(found.known) <= SIZES
    for width in range(1, 8 * SIZES):
        operation(draw(1, 2, width, 8), draw(1, 2, width, 8), draw(1, 2, width, 8))
        assert len(found._asked) <= 4 * SIZES + 1


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
    assert max(map(len, operation._shortcuts.known.values())) <= CALLS
    large = draw(LARGEST // 64 + 1, 64)
    operation, count = shortened("rms_norm", (large,), {})
    assert count() == 0
