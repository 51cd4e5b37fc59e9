"""swiglu and geglu: dispatch, float64 gradients, transformers' modules, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from easytorch.kernels.interop import installed
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORCED = [None, "native", "aten"]
CASES: dict[str, tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "swiglu": ("swiglu", {}, F.silu),
    "geglu": ("geglu", {}, F.gelu),
    "geglu_tanh": ("geglu", {"approximate": "tanh"}, lambda gate: F.gelu(gate, approximate="tanh")),
}


def unit(name: str, backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create(name, OperationMetadata(backend=backend, **metadata))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("forced", FORCED)
def test_units_and_gradients(forced: str | None, case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    name, options, activation = CASES[case]
    gate, up = (torch.randn(3, 7, 61, dtype=dtype).mul(3).requires_grad_() for _ in range(2))
    gate64, up64 = (x.detach().double().requires_grad_() for x in (gate, up))
    got, expected = unit(name, forced)(gate, up, **options), activation(gate64) * up64
    assert got.dtype == dtype
    grad = torch.randn(3, 7, 61, dtype=dtype)
    grads = torch.autograd.grad(got, (gate, up), grad)
    grads64 = torch.autograd.grad(expected, (gate64, up64), grad.double())
    for a, b in zip((got, *grads), (expected, *grads64), strict=True):
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "activation"), [("swiglu", "silu"), ("geglu", "gelu")])
def test_bit_identical_to_the_modules_of_transformers(name: str, activation: str, dtype: torch.dtype) -> None:
    activations = pytest.importorskip("transformers.activations")
    gate, up = torch.randn(2, 9, 64, dtype=dtype), torch.randn(2, 9, 64, dtype=dtype)
    assert torch.equal(unit(name)(gate, up), activations.ACT2FN[activation](gate) * up)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("forced", FORCED)
def test_runtime_dtype_strides_and_errors(forced: str | None, name: str) -> None:
    packed = torch.randn(5, 24)
    gate, up = packed.chunk(2, dim=-1)
    operation = unit(name, forced)
    torch.testing.assert_close(operation(gate, up), operation(gate.contiguous(), up.contiguous()))
    assert unit(name, forced, runtime_dtype=torch.bfloat16)(gate, up).dtype == torch.bfloat16
    for wrong in (up[:, :6], up[:1], up.double(), up.long()):
        with pytest.raises(ValueError, match="one shape and dtype"):
            operation(gate, wrong)


def test_an_unknown_approximation_is_an_error() -> None:
    x = torch.randn(2, 4)
    for forced in FORCED:
        with pytest.raises(ValueError, match="approximate must be one of none, tanh, got 'erf'"):
            unit("geglu", forced)(x, x, approximate="erf")


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_the_path_of_each_platform(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    operation = unit(name)
    call = operation.typical_call()
    assert call is not None
    found = {platform: operation.choose_on(platform, *call).backend for platform in PLATFORMS}
    assert found == {"cpu": "aten", "cuda": "triton", "rocm": "triton", "tpu": "native"}
    wide = torch.empty(2, 8, dtype=torch.float64, device="meta")
    assert "float64" in operation.choose_on("cuda", (wide, wide), {}).reason
    with pytest.raises(UnsupportedOperationError, match="runs on cuda, rocm, the tensors are on cpu"):
        unit(name, "triton")(torch.ones(2, 8), torch.ones(2, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_check_mode(case: str, dtype: torch.dtype, compared: list[str]) -> None:
    name, options, _ = CASES[case]
    unit(name, "aten")(torch.randn(9, 60, dtype=dtype), torch.randn(9, 60, dtype=dtype), **options)
    assert compared == [f"{name}:aten"]


@pytest.mark.parametrize("case", CASES)
def test_compile_and_export(case: str) -> None:
    name, options, _ = CASES[case]
    operation, gate, up = unit(name), torch.randn(3, 8), torch.randn(3, 8)

    class Module(torch.nn.Module):
        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return operation(gate, up, **options)

    expected = operation(gate, up, **options)
    torch.testing.assert_close(torch.compile(Module(), fullgraph=True, backend="aot_eager")(gate, up), expected)
    torch.testing.assert_close(torch.export.export(Module(), (gate, up)).module()(gate, up), expected)
