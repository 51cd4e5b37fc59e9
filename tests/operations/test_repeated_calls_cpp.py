"""What C++ alone could get wrong of a repeated call: references, threads, errors, modes, and where it is looked for."""

from __future__ import annotations

import gc
import random
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from easytorch.kernels.cpu import library as cpu_library
from easytorch.kernels.repeated import library
from easytorch.kernels.repeated.steps import GIVEN, RESULT, Operator, Steps
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.record import recorded_operations
from easytorch.operations.dispatch.shortcuts import LARGEST, forget_all
from tests.operations.test_repeated_calls import draw, value

pytestmark = pytest.mark.skipif(
    cpu_library.missing() is not None or library.module() is None, reason=f"repeated calls: {library.described()}"
)


def repeated(name: str, *args: Any, **kwargs: Any) -> Any:
    """The operation after so many such calls that the next is found in C++."""
    operation = OperationRegistry.create(name)
    for _ in range(3):
        operation(*args, **kwargs)
    assert found(operation) == 1
    return operation


def found(operation: Any) -> int:
    """How many of its calls C++ has found since this was asked."""
    known = operation._shortcuts.in_cpp
    count, known.found = known.found, 0
    return int(count)


def examples() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    heads, one, wide = draw(2, 16, 4, 8), draw(2, 1, 4, 8), draw(3, 256)
    yield "linear", (draw(3, 8), draw(5, 8), draw(5)), {}
    yield "linear", (draw(32, 64), draw(256, 64)), {}  # of so many numbers that other threads run meanwhile
    yield "rms_norm", (draw(3, 8), draw(8)), {"eps": 0.5}
    yield "rms_norm", (wide, draw(256)), {}
    yield "rms_norm", (wide.bfloat16(), None, 0.25), {}
    yield "layer_norm", (draw(3, 8), draw(8), None, 0.5), {}
    yield "swiglu", (draw(3, 8), draw(3, 8)), {}
    yield "swiglu", (wide, wide + 1), {}
    yield "geglu", (draw(3, 8), draw(3, 8), "tanh"), {}
    yield "geglu", (wide, wide + 1), {"approximate": "tanh"}
    yield "linear", (draw(2, 64, dtype=torch.bfloat16), draw(4096, 64, dtype=torch.bfloat16)), {}
    yield "attention", (heads, heads + 1, heads - 1), {"causal": True, "mask": None, "softmax_scale": 1.0}
    yield "attention", (one, heads, heads + 1), {"causal": True}


EXAMPLES = [pytest.param(*example, id=f"{n}-{example[0]}") for n, example in enumerate(examples())]


@pytest.mark.parametrize(("name", "args", "kwargs"), EXAMPLES)
@torch.no_grad()
def test_nothing_is_kept_of_a_call_and_nothing_is_given_away(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    operation = repeated(name, *args, **kwargs)
    objects = [*args, *kwargs, *kwargs.values(), operation, None, True, AttentionOutput, Tensor]
    sys.setrecursionlimit(sys.getrecursionlimit())  # so that nothing below is the first of its kind
    for rounds in (1, 500):
        gc.collect()
        before = [sys.getrefcount(one) for one in objects]
        for _ in range(rounds):
            operation(*args, **kwargs)
        after = [sys.getrefcount(one) for one in objects]
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) < 20
    tracemalloc.start()
    try:
        for _ in range(100):
            operation(*args, **kwargs)
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            operation(*args, **kwargs)
        assert tracemalloc.get_traced_memory()[0] - start < 2000
    finally:
        tracemalloc.stop()
    assert found(operation) == 2601


def test_an_operation_and_what_it_runs_are_freed() -> None:
    operation, x = OperationRegistry.create("rms_norm"), draw(3, 8)
    for _ in range(3):
        operation(x, eps=0.75)
    (kept,) = next(iter(operation._shortcuts.known.values()))
    watched = [weakref.ref(operation), weakref.ref(operation._shortcuts), weakref.ref(kept.run.run)]
    del operation, kept
    gc.collect()
    assert [one() for one in watched] == [None] * 3


def test_a_cycle_through_what_is_run_is_collected() -> None:
    known, x = library.module().Known(), draw(3, 8)

    class Runner:
        def __call__(self, x: Tensor) -> Tensor:
            return x

    runner: Any = Runner()
    runner.known = known
    known.add((x,), 1, {}, runner, None, False, False, {}, None)
    gone = weakref.ref(runner)
    del runner, known
    gc.collect()
    assert gone() is None


def test_what_is_not_kept_is_refused() -> None:
    known, x = library.module().Known(), draw(3, 8)
    plain = (None, False, False, {}, None)
    for args, tensors, rest in (
        ((x,), 0, plain), ((x,) * 5, 5, plain), ((x,), 2, plain), ((x.to_sparse(),), 1, plain),
        ((draw(*[1] * 7),), 1, plain), ((3,), 1, plain), ((x.to("meta"),), 1, plain),
        ((x,), 1, ((("aten::relu", "", ()),), *plain[1:])), ((x,), 1, ((("aten::relu", "", (GIVEN[1],)),), *plain[1:])),
        ((x,), 1, ((("aten::no_such_operator", "", (GIVEN[0],)),), *plain[1:])),
        ((x,), 1, ((("aten::relu", "", ([],)),), *plain[1:])), ((x,), 1, ((("aten::relu", ""),), *plain[1:])),
        ((x,), 1, (*plain[:4], (AttentionOutput, {}))), ((x,), 1, (*plain[:4], (3, {}))),
        *(((x,), 1, (*plain[:3], {asked: 3}, None)) for asked in (3, (torch,), (3, "x"), (torch, 3))),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            known.add(args, tensors, {}, None, *rest)
    with pytest.raises(TypeError):
        library.module().watch(3)
    with pytest.raises(TypeError):
        library.module().set_slots(3, 4)
    assert repr(RESULT) == "RESULT"


@torch.no_grad()
def test_random_calls_give_what_the_operation_gives() -> None:
    draws, operations = random.Random(0), {}
    for name in ("linear", "rms_norm", "layer_norm", "swiglu", "geglu", "attention"):
        operations[name] = OperationRegistry.create(name), OperationRegistry.create(name)
        operations[name][1]._shortcuts = None

    def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
        made = draw(*shape, dtype=dtype)
        if len(shape) > 1 and draws.random() < 0.2:
            made = made.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.nn.Parameter(made) if draws.random() < 0.1 else made

    def arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = draws.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        rows, width, either = draws.choice((1, 3)), draws.choice((8, 128)), draws.random() < 0.5
        x, vector = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
        if name == "attention":
            keys = draws.choice((16, 20))
            query = tensor(1, draws.choice((1, keys)), draws.choice((2, 4)), 8, dtype=dtype)
            named = draws.choice(({}, {"causal": True}, {"softmax_scale": 0.5, "causal": False}, {"mask": None}))
            return (query, *(tensor(1, keys, 2, 8, dtype=dtype) for _ in range(2))), named
        if name == "linear":
            return (x, tensor(5, width, dtype=dtype), *draws.choice(((), (None,), (tensor(5, dtype=dtype),)))), {}
        if name in ("swiglu", "geglu"):
            second = x if either else tensor(rows, width, dtype=dtype)
            return (x, second), {"approximate": "tanh"} if name == "geglu" and draws.random() < 0.5 else {}
        return draws.choice(((x,), (x, vector), (x, None))), {"eps": 1e-3} if either else {}

    count = 0
    for name in 60 * list(operations):
        args, kwargs = arguments(name)
        for _ in range(4):
            known = operations[name][0]._shortcuts.in_cpp
            before = 0 if known is None else known.found
            got, want = (one(*args, **kwargs) for one in operations[name])
            count += known is not None and known.found == before + 1
            assert type(got) is type(want)
            if isinstance(got, AttentionOutput):
                assert vars(got).keys() == vars(want).keys() and got.attention_weights is got.cache_view is None
                got, want = value(got), value(want)
            assert torch.equal(got, want) and got.stride() == want.stride() and got.dtype == want.dtype
            assert got.requires_grad == want.requires_grad
            args = tuple(one.clone() if isinstance(one, Tensor) and type(one) is Tensor else one for one in args)
    assert count > 300, count


def test_an_error_of_torch_is_raised_once() -> None:
    x, weight = draw(3, 8), draw(5, 8).requires_grad_()
    operation, packed = repeated("linear", x, weight), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        raise KeyError("no room")

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        pytest.raises(KeyError, match="no room"),
    ):
        operation(x, weight)
    assert len(packed) == 1
    assert operation(x, weight).requires_grad and found(operation) == 2


def test_modes_and_profiles_see_the_operators() -> None:
    x, weight = draw(3, 8), draw(5, 8)
    operation = repeated("linear", x, weight)
    want, seen = operation(x, weight), []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    found(operation)
    for mode in (Functions(), Operators()):
        seen.clear()
        with mode:
            assert torch.equal(operation(x, weight), want)
        assert seen and not found(operation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operation(x, weight)
    assert "aten::linear" in {event.name for event in profile.events()} and found(operation) == 1


def test_a_kernel_that_is_switched_off_does_not_run() -> None:
    heads = draw(2, 16, 4, 8)
    args = heads, heads + 1, heads - 1
    with torch.no_grad():
        operation = repeated("attention", *args, causal=True)
        with sdpa_kernel([SDPBackend.MATH]), torch.profiler.profile() as profile:
            operation(*args, causal=True)
        assert "aten::_scaled_dot_product_attention_math" in {event.name for event in profile.events()}
        assert not found(operation)
        operation(*args, causal=True)
        assert found(operation) == 1
        with sdpa_kernel([SDPBackend.MATH]):
            other = OperationRegistry.create("attention")
            for _ in range(3):
                other(*args, causal=True)
            assert found(other) == 1  # what it runs asks torch again
            with torch.profiler.profile() as profile:
                other(*args, causal=True)
            assert "aten::_scaled_dot_product_attention_math" in {event.name for event in profile.events()}


def test_what_replaces_the_call_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(3, 8)
    operation = repeated("rms_norm", x)
    with recorded_operations() as called:
        for _ in range(4):
            operation(x)
    assert called == {"rms_norm"} and not found(operation)
    for _ in range(3):
        operation(x)
    assert found(operation) == 1
    with monkeypatch.context() as patched:
        patched.setattr(type(operation), "__call__", lambda self, x: "replaced")
        assert operation(x) == "replaced"
    for _ in range(3):
        operation(x)
    assert found(operation) == 1


def test_threads_that_call_while_others_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(OperationRegistry.create(name), args, kwargs) for name, args, kwargs in examples()]
    want, wrong, ended = [one(*args, **kwargs) for one, args, kwargs in cases], [], threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not ended.is_set():
                for (operation, args, kwargs), expected in zip(cases, want, strict=True):
                    if not torch.equal(value(operation(*args, **kwargs)), value(expected)):
                        wrong.append(operation)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=call) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(200):
            forget_all()
            monkeypatch.setenv("EASYTORCH_CHECK", "0")
            monkeypatch.delenv("EASYTORCH_CHECK")
            gc.collect(0)
            ended.wait(0.002)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong


def test_large_calls_and_calls_that_python_alone_compares() -> None:
    large = draw(LARGEST // 64 + 1, 64)
    operation = OperationRegistry.create("rms_norm")
    for _ in range(4):
        operation(large)
    assert operation._shortcuts.in_cpp is None
    many = draw(*[1] * 6, 8)  # of more dimensions than C++ compares
    for _ in range(4):
        operation(many)
    assert not found(operation) and len(operation._shortcuts.known) == 1


def test_steps_are_called_as_what_they_run() -> None:
    steps = Steps(torch.relu, (Operator("aten::relu", GIVEN[:1]),))
    assert torch.equal(steps(draw(3) - 1), torch.relu(draw(3) - 1))
