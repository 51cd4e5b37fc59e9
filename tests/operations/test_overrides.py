"""What a subclass, a mixin or a copy of an operation overrides is what runs, at every size, chosen or compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.attention.selection import Attention
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.check import OperationMismatchError
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.glu import SwiGLU
from easytorch.operations.layer_norm import LayerNorm
from easytorch.operations.linear import Linear
from easytorch.operations.rms_norm import RMSNorm
from easytorch.operations.rotary import Rotary

ONE = "the subclass's"


class Mine:
    """A path for the CPU as a mixin has it."""

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return ONE


def heads(length: int) -> Tensor:
    return torch.randn(1, length, 4, 64)


# On both sides of the sizes from which C++ or oneDNN is preferred.
CALLS: list[tuple[type[OperationImpl], tuple[tuple[Tensor, ...], ...]]] = [
    (RMSNorm, ((torch.ones(3, 64),), (torch.ones(3, 256), torch.ones(256)), (torch.ones(3, 256).double(),))),
    (LayerNorm, ((torch.ones(3, 64),), (torch.ones(64, 256).bfloat16(), torch.ones(256).bfloat16()))),
    (SwiGLU, ((torch.ones(3, 64),) * 2, (torch.ones(3, 512),) * 2)),
    (Rotary, ((heads(3), heads(3), *[torch.ones(1, 3, 64)] * 2),)),
    (Linear, tuple((torch.ones(rows, 1024), torch.ones(size, 1024)) for rows in (1, 300) for size in (8, 2048))),
    (Attention, tuple((heads(rows), heads(300), heads(300)) for rows in (1, 4, 300))),
]


@pytest.mark.parametrize(("base", "calls"), CALLS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("recorded", [False, True])
def test_a_path_of_its_own_runs_at_every_size(
    base: type[OperationImpl], calls: tuple[tuple[Tensor, ...], ...], recorded: bool
) -> None:
    of_class = type("OfClass", (base,), {"forward_cpu": Mine.forward_cpu})()
    named = type("Named", (base,), {"forward_cpu": backend("mine")(lambda *args, **kwargs: ONE)})()
    mixed = type("Mixed", (Mine, base), {})()
    deeper = type("Deeper", (type(mixed),), {})()
    for given in calls:
        args = tuple(one.clone().requires_grad_(recorded) for one in given)
        for operation in (of_class, named, mixed, deeper):
            assert operation(*args) == ONE and operation.choose(*args).method == "forward_cpu"


@pytest.mark.parametrize("base", [RMSNorm, SwiGLU, Linear])
def test_a_run_of_a_mixin_runs_at_every_size(base: type[OperationImpl]) -> None:
    class Twice:
        def run(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return ONE

    operation = type("Mixed", (Twice, base), {})()
    # two rows, for one in float32 is ATen's on some CPUs
    wide = (torch.ones(2, 2048), torch.ones(2048, 2048) if base is Linear else torch.ones(2, 2048))
    with torch.no_grad():
        calls = [wide[:1] if base is RMSNorm else wide]
        if base is not Linear:  # whose other paths cast for themselves
            calls.append(tuple(one[:, :64] for one in calls[0]))
        for args in calls:
            assert operation(*args) == ONE


def test_a_definition_with_one_more_argument_is_not_given_to_c() -> None:
    class Shifted(RMSNorm):
        def forward_native(
            self, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
        ) -> Tensor:
            return super().forward_native(x, weight, eps) + offset

        def forward_cpu(
            self, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
        ) -> Tensor:
            return self.forward_native(x, weight, eps, offset)

    x = torch.randn(2, 256)
    torch.testing.assert_close(Shifted()(x, offset=1.0), RMSNorm()(x) + 1.0)


def test_what_a_subclass_refuses_is_refused() -> None:
    class NoHalf(RMSNorm):
        def supports(self, backend: str, x: Tensor, *args: Any, **kwargs: Any) -> str | None:
            return "no half" if x.dtype == torch.float16 and backend != "native" else None

    for size in (64, 256):
        with torch.no_grad():
            assert NoHalf().choose(torch.ones(2, size)).backend != "native"
            half = NoHalf().choose(torch.ones(2, size).half())
            assert half.backend == "native" and "no half" in half.reason


def test_the_check_compares_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(RMSNorm):
        def run_cpp(self, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
            return torch.zeros_like(x)

    x = torch.randn(2, 256)
    if Wrong().choose(x).method != "forward_cpp":
        pytest.skip("no operator in C++ is preferred on this CPU")
    monkeypatch.setenv("EASYTORCH_OPS", "linear=native")
    assert torch.equal(Wrong()(x), torch.zeros_like(x))
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    with pytest.raises(OperationMismatchError, match="rms_norm"):
        Wrong()(x)


@pytest.mark.parametrize("name", ["linear", "attention", "decode", "flash", "rms_norm"])
def test_the_check_knows_of_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    torch.manual_seed(0)
    args = {"linear": (torch.randn(9, 64), torch.randn(32, 64)), "rms_norm": (torch.randn(3, 256),)}.get(
        name, (heads(1 if name == "decode" else 9), heads(300), heads(300))
    )
    with torch.autocast("cpu", torch.bfloat16):
        OperationRegistry.create(name)(*args)


@pytest.mark.parametrize("name", OperationRegistry.names())
def test_a_shallow_copy_runs_itself(name: str) -> None:
    operation = OperationRegistry.create(name)
    copied = copy.copy(operation)
    assert type(copied) is type(operation) and copied.metadata is operation.metadata
    found = [choice for choices in copied._own.values() for choice in (*choices, *copied.cpp_choices)]
    assert all(choice.operation is copied for choice in found)


def test_the_metadata_of_an_operation_is_fixed() -> None:
    operation = OperationRegistry.create("rms_norm")
    with pytest.raises(AttributeError, match="rms_norm: the metadata of an operation is fixed; make another one"):
        operation.metadata = OperationMetadata(backend="native")
    with pytest.raises(TypeError, match=r"rms_norm: metadata must be OperationMetadata or None, got .*dict"):
        OperationRegistry.create("rms_norm", {"backend": "native"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OperationRegistry.names())
def test_an_argument_twice_is_laid_to_the_operation(name: str) -> None:
    operation = OperationRegistry.create(name)
    args, kwargs = operation.typical_call() or ((), {})
    first = (operation._positional or ("",))[0]
    for call in (operation, operation.choose):
        with pytest.raises(TypeError, match=rf"^\w+\(\) got multiple values for argument '{first}'"):
            call(*args, **kwargs, **{first: args[0]})


@pytest.mark.parametrize("length", [1, 4, 300])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["attention", "flash", "sdpa", "vanilla", "blocksparse"])
def test_what_is_no_feature_of_attention_is_refused_at_every_size(name: str, recorded: bool, length: int) -> None:
    operation, k = OperationRegistry.create(name), heads(300).requires_grad_(recorded)
    for wrong in ({"lengths": torch.tensor([3])}, {"draw": False}, {"columns": 10}, {"nonsense": 1}):
        for call in (operation, operation.choose):
            with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{next(iter(wrong))}'"):
                call(heads(length), k, k, **wrong)
    for place in range(3):
        args = [heads(length), k, k]
        args[place] = args[place].detach().to_sparse()
        for call in (operation, operation.choose):
            with pytest.raises((TypeError, ValueError), match="dense"):
                call(*args)


def test_paths_to_kernels_that_are_not_there_say_so() -> None:
    def new_name(cls: type[OperationImpl]) -> str:
        return "my_norm"

    body = {"get_impl_name": classmethod(new_name), "paths": {"cpu": "aten"}}
    with pytest.raises(
        ValueError, match=r"my_norm: paths names my_norm of easytorch.kernels.my_norm.aten, which is not"
    ):
        type("MyNorm", (RMSNorm,), dict(body))
    with pytest.raises(
        ValueError, match=r"my_norm: paths names my_norm of easytorch.kernels.rms_norm.aten, which is not"
    ):
        type("MyNorm", (RMSNorm,), body | {"folder": "rms_norm"})
    assert type("MyNorm", (RMSNorm,), body | {"folder": "rms_norm", "functions": {"aten": "aten.rms_norm"}})
