"""swiglu and geglu by the operator in C++: every instruction set this CPU has, odd sizes, any layout, the ends of the
range."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers.activations import ACT2FN

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.glu import cpu, native
from easytorch.layers.gate import gated
from easytorch.layers.mlp import GatedMLP
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Definition = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# activation -> its number in C++, and the definition
UNITS: dict[str, tuple[int, Definition]] = {
    "silu": (cpu.SILU, native.swiglu),
    "gelu": (cpu.GELU["none"], native.geglu),
    "gelu_tanh": (cpu.GELU["tanh"], lambda gate, up: native.geglu(gate, up, "tanh")),
}
# The activations in float64 without cancellation: the definition's 1 + erf and 1 + tanh lose the tail.
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}
OPTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "silu": ("swiglu", {}),
    "gelu": ("geglu", {}),
    "gelu_tanh": ("geglu", {"approximate": "tanh"}),
}


def unit(name: str, backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create(name, OperationMetadata(backend=backend))


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("glu"))
def test_odd_sizes_at_every_level(level: int, dtype: torch.dtype, name: str) -> None:
    activation, definition = UNITS[name]
    generator = torch.Generator().manual_seed(level)
    for n in (1, 7, 8, 15, 16, 31, 33, 60, 64, 65, 128, 1000):
        gate, up = (torch.randn(5, n, generator=generator).mul(3).to(dtype) for _ in range(2))
        got = cpu.run(guarded(gate), guarded(up), activation, level)
        assert got.dtype == dtype and got.is_contiguous()
        assert relative_rms_error(got, definition(gate.double(), up.double())) <= TOLERANCE[dtype], n


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("level", library.levels_of("glu"))
def test_every_gate_of_sixteen_bits(level: int, name: str) -> None:
    """All 65,536 numbers of each dtype, the subnormal, infinite and NaN ones too: within one unit of the last place of
    float64's result, and NaN and infinity where the definition has them."""
    activation, definition = UNITS[name]
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        gate = bits.view(dtype)
        up = torch.ones_like(gate)
        got, expected = cpu.run(gate, up, activation, level), definition(gate, up)
        assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
        exact = EXACT[name](gate.double()).nan_to_num(0.0, 0.0, 0.0)
        unit_of = exact.abs().clamp_min(torch.finfo(dtype).tiny) * torch.finfo(dtype).eps
        finite = got.double().nan_to_num(0.0, 0.0, 0.0)
        assert ((finite - exact).abs() <= unit_of + 1e-35).all()  # exp(x) is 0 below -88
        # the activation is rounded before it is multiplied, as by the definition
        up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.testing.assert_close(
            cpu.run(gate, up, activation, level), got * up, rtol=0, atol=0, equal_nan=True, msg=str(dtype)
        )


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("level", library.levels_of("glu"))
def test_float32_to_the_last_places(level: int, name: str) -> None:
    activation, definition = UNITS[name]
    gate = torch.cat([torch.linspace(-12, 12, 24001), torch.logspace(-40, 38, 2001), -torch.logspace(-40, 38, 2001)])
    up = torch.ones_like(gate)
    got = cpu.run(gate, up, activation, level).double()
    exact = EXACT[name](gate.double())
    assert ((got - exact).abs() <= exact.abs() * 2e-5 + 1e-35).all()  # exp(z) for z of -87 magnifies the rounding of z
    torch.testing.assert_close(got.float(), definition(gate, up), rtol=1e-5, atol=2e-6)


@needs_library
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(dtype: torch.dtype, name: str) -> None:
    operation, options = OPTIONS[name]
    wide = torch.randn(40, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    gates = [
        wide[:3, :130], wide[:3, 1:131], wide[:3, ::2][:, :130], wide.t()[:130, :5].t(), wide[:1, :130].expand(4, 130),
        wide[:, :130].view(2, 4, 5, 130)[:, 1:3, ::2], wide[0, :130], wide[:0, :130], wide[:4, :1].expand(4, 130),
        torch.empty(2, 0, 130, dtype=dtype), wide[:3, :0], torch._neg_view(wide[:2, :130]), wide[:3, 130:260],
    ]  # fmt: skip
    for gate in gates:
        other = torch.randn(gate.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for up in (gate, other, other.mT.contiguous().mT if other.dim() > 1 else other, torch._neg_view(other)):
            got = unit(operation, "cpu")(gate, up, **options)
            expected = unit(operation, "native")(gate.double(), up.double(), **options)
            assert got.shape == expected.shape and got.dtype == dtype
            if got.numel():
                assert relative_rms_error(got, expected) <= TOLERANCE[dtype]


@needs_library
def test_many_rows_by_several_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(700, 129, generator=generator) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(cpu.run(gate, up, cpu.SILU, library.BEST), native.swiglu(gate, up))
    finally:
        torch.set_num_threads(threads)


@needs_library
@pytest.mark.parametrize("name", UNITS)
def test_the_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    monkeypatch.setattr(processor, "AVX512", True)
    operation, options = unit(OPTIONS[name][0]), OPTIONS[name][1]
    for dtype in DTYPES:
        gate, up = torch.ones(2, 256, dtype=dtype), torch.ones(2, 256, dtype=dtype)
        assert operation.choose(gate, up, **options).backend == "cpu"
        assert operation.choose(*(x for x in (gate,)), up=up, **options).backend == "cpu"
        assert operation.choose(gate.requires_grad_(), up, **options).backend == "aten"
        with torch.no_grad():
            assert operation.choose(gate, up, **options).backend == "cpu"
        gate, up = (torch.empty(512, 256, dtype=dtype, requires_grad=leaf) for leaf in (True, False))
        slower = name == "gelu" and dtype is torch.bfloat16
        assert operation.choose(gate, up, **options).backend == ("aten" if slower else "cpu")
    for gate in (
        torch.ones(2, 255),
        torch.ones(2, 256).double(),
        torch.ones(2, 256, device="meta"),
        torch.ones(2, 256).as_subclass(type("Other", (torch.Tensor,), {})),
    ):
        assert operation.choose(gate, gate, **options).backend != "cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(torch.ones(2, 256), torch.ones(2, 256), **options).backend == "cpu"
        assert operation(torch.ones(2, 256), torch.ones(2, 256), **options).dtype is torch.float32, "nothing is cast"
    torch.func.vmap(lambda row: operation(row, row, **options))(torch.ones(2, 256))
    monkeypatch.setattr(processor, "AVX512", False)
    for dtype in DTYPES:
        gains = name == "gelu_tanh" or dtype is torch.float32
        gate = torch.ones(2, 256, dtype=dtype)
        assert operation.choose(gate, gate, **options).backend == ("cpu" if gains else "aten")
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(torch.ones(2, 256), torch.ones(2, 256), **options).backend == "aten"


@needs_library
def test_a_forced_call_that_it_does_not_take_is_refused() -> None:
    gate = torch.ones(2, 256, dtype=torch.float64)
    for name in ("swiglu", "geglu"):
        with pytest.raises(UnsupportedOperationError, match="float64"):
            unit(name, "cpu")(gate, gate)
        with pytest.raises(NotImplementedError, match="float64"):
            getattr(cpu, name)(gate, gate)
    with pytest.raises(ValueError, match="one shape and dtype"):
        cpu.swiglu(torch.ones(2, 256), torch.ones(2, 255))
    with pytest.raises(ValueError, match="approximate must be one of none, tanh"):
        cpu.geglu(torch.ones(2, 256), torch.ones(2, 256), "erf")
    for gate, up, activation, why in (
        (torch.ones(2, 8), torch.ones(2, 9), 0, "do not fit"),
        (torch.ones(2, 8), torch.ones(8), 0, "takes gate and up"),
        (torch.ones(2, 8), torch.ones(2, 8).half(), 0, "one dtype"),
        (torch.ones(2, 8), torch.ones(2, 8), 3, "activation is"),
        (torch.ones(8, 2).t(), torch.ones(2, 8), 0, "must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.glu.default(gate, up, activation, library.BEST)
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.glu_backward.default(gate, gate, up, activation, library.BEST)
    gate = torch.ones(2, 8)
    for grad, why in (
        (gate[:1], "do not fit"),
        (gate.half(), "one dtype"),
        (torch.ones(8, 2).t(), "must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.glu_backward.default(grad, gate, gate, 0, library.BEST)


@needs_library
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_layers_take_the_same_way(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(3, 600, generator=generator).to(torch.bfloat16).chunk(2, -1)
    module = ACT2FN[act]
    activation = {"silu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2}.get(act)
    got = gated(module, gate, up)
    if activation is not None:
        assert torch.equal(got, cpu.run(gate, up, activation, library.BEST))
    assert relative_rms_error(got, module(gate.double()) * up.double()) <= TOLERANCE[torch.bfloat16]
    monkeypatch.setenv("EASYTORCH_OPS", "swiglu=aten,geglu=aten")
    torch.testing.assert_close(got, gated(module, gate, up))
    monkeypatch.delenv("EASYTORCH_OPS")
    layer = GatedMLP(64, 300, act).to(torch.bfloat16)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    recorded = layer(x)
    assert recorded.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(layer(x), recorded, rtol=2e-2, atol=2e-3)
