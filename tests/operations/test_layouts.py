"""Every operation on every implementation, its tensors laid out in memory in every way: values and gradients against
the definition in float64, which is given the same numbers side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.weight import QuantizedWeight
from easytorch.operations import OperationMetadata, OperationOutput, OperationRegistry
from easytorch.operations.check import TOLERANCE, relative_rms_error

_spec = importlib.util.spec_from_file_location(
    "fuzz_operations", Path(__file__).parents[2] / "scripts/fuzz_operations.py"
)
assert _spec is not None and _spec.loader is not None
fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)


def _apart(x: Tensor) -> Tensor:
    """The last dimension strided; what lies between must not be read."""
    return torch.stack([x, torch.full_like(x, float("nan") if x.is_floating_point() else 99), x], -1)[..., 0]


def _turned(x: Tensor) -> Tensor:
    """All dimensions in the other order in memory."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _inside(x: Tensor) -> Tensor:
    """A part of a larger tensor, from an odd offset."""
    larger = x.new_full([n + 3 for n in x.shape], 7)
    part = larger[tuple(slice(1, n + 1) for n in x.shape)]
    return part.copy_(x)


def _repeated(x: Tensor) -> Tensor:
    """Stride 0 in the first dimension: the first row for all."""
    return x[:1].expand(x.shape) if x.dim() and x.shape[0] else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "apart": _apart, "turned": _turned, "inside": _inside, "repeated": _repeated,
}  # fmt: skip
TABLES = ("cos", "sin")  # whose gradients the definition alone takes
CALLS = [
    pytest.param(case, implementation, id=f"{case.operation}-{number}-{implementation}")
    for number, case in enumerate(fuzz.cases())
    for implementation in fuzz.implementations(case.operation)
    if implementation is not None
]


def _laid_out(value: Any, layout: str) -> Any:
    if isinstance(value, QuantizedWeight):
        if layout == "repeated":
            return value
        tensors = [None if x is None else LAYOUTS[layout](x) for x in (value.data, value.scale, value.zero)]
        return QuantizedWeight(*tensors, value.format, value.shape, value.group_size)
    if not isinstance(value, Tensor) or (layout == "repeated" and not value.is_floating_point()):
        return value  # integers say who is where: rows alike would be another call, or none
    if layout == "apart" and value.element_size() == 1 and value.dtype != torch.bool:
        return value
    return LAYOUTS[layout](value)


def _results(name: str, backend: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the result, and the gradient of every floating argument."""
    leaves = {
        n: x.detach().requires_grad_()
        for n, x in arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point() and n not in TABLES
    }
    result = OperationRegistry.create(name, OperationMetadata(backend=backend))(**{**arguments, **leaves})
    if isinstance(result, OperationOutput):
        result = [x for n, x in result.to_dict().items() if n != "attention_weights" and x is not None]
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in outputs)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return found | {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, QuantizedWeight):
        tensors = [None if x is None else x.contiguous() for x in (value.data, value.scale, value.zero)]
        return QuantizedWeight(*tensors, value.format, value.shape, value.group_size)
    if not isinstance(value, Tensor):
        return value
    return value.double().clone(memory_format=torch.contiguous_format) if value.is_floating_point() else value.clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("case", "implementation"), CALLS)
def test_any_layout(case: Any, implementation: str, layout: str) -> None:
    if not fuzz.carries(case, implementation):
        pytest.skip("the implementation refuses this call")
    given = {name: _laid_out(value, layout) for name, value in case.arguments.items()}
    expected = _results(case.operation, "native", {name: _plain(value) for name, value in given.items()})
    for name, got in _results(case.operation, implementation, given).items():
        assert got.isfinite().all(), name
        want = expected[name]
        if got.numel() == 0 or max(float(x.abs().amax()) for x in (got, want)) < 1e-6:
            continue  # 0 but for rounding, as of a weight whose rows are alike
        error = relative_rms_error(got, want)
        assert error <= 4 * TOLERANCE[torch.float32], f"{name}: relative RMS error {error:.2g}"
