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
from easytorch.operations import OperationMetadata, OperationOutput, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

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


def _compiled_by_flash(case: Any, implementation: str) -> bool:
    """Whether it is a call that XLA takes seconds to compile, which flash's own cases have too."""
    return (case.operation, implementation) == ("attention", "flash:xla") and case.arguments["key"].shape[1] < 100


CALLS = [
    pytest.param(case, implementation, id=f"{case.operation}-{number}-{implementation}")
    for number, case in enumerate(fuzz.cases())
    for implementation in fuzz.implementations(case.operation)
    if implementation is not None and not _compiled_by_flash(case, implementation)
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
    """The tensors of the result, and the gradient of every floating argument, where the backend has gradients."""
    leaves = {
        n: x.detach().requires_grad_()
        for n, x in arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point() and n not in TABLES
    }
    operation = OperationRegistry.create(name, OperationMetadata(backend=backend))
    try:
        result = operation(**{**arguments, **leaves})
    except UnsupportedOperationError as refusal:
        if "gradient" not in str(refusal):
            raise
        leaves = {}
        result = operation(**arguments)
    if isinstance(result, OperationOutput):
        result = [x for n, x in result.to_dict().items() if n != "attention_weights" and x is not None]
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in outputs)
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if total.requires_grad:  # a result of no rows may depend on nothing
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


def _zero_sizes() -> list[Any]:
    """Calls with no sequence, query, key, channel, expert or width of a value."""

    def heads(batch: int, length: int, keys: int, value_dim: int) -> dict[str, Tensor]:
        shapes = {"query": (batch, length, 4, 8), "key": (batch, keys, 2, 8), "value": (batch, keys, 2, value_dim)}
        return {name: torch.ones(shape) for name, shape in shapes.items()}

    sizes = [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (2, 3, 4, 0), (0, 1, 4, 0), (2, 1, 0, 8), (2, 1, 4, 0)]

    def matrices(batch: int, length: int, keys: int, _: int) -> dict[str, Tensor]:
        shape, ids = (batch, 4, length, keys), {"query_segment_ids": length, "key_segment_ids": keys}
        found = {"bias": torch.ones(shape), "mask": torch.ones(shape, dtype=torch.bool)}
        return found | {name: torch.zeros(batch, size, dtype=torch.int64) for name, size in ids.items()}

    calls = [
        (name, {**heads(*size), **features})
        for name in ("attention", "vanilla", "sdpa", "flash", "blocksparse", "ring", "decode")
        for size in sizes
        if size[1] == 1 or name != "decode"
        for features in (
            {"causal": True}, {"sliding_window": 2, "causal": True}, {"sinks": torch.ones(4)}, matrices(*size)
        )
    ]  # fmt: skip
    for shape in ((0, 4), (3, 0), (2, 0, 4)):
        x, row = torch.ones(shape), torch.ones(shape[-1])
        calls += [("rms_norm", {"x": x, "weight": row}), ("layer_norm", {"x": x, "weight": row, "bias": row})]
        calls += [("swiglu", {"gate": x, "up": x}), ("geglu", {"gate": x, "up": x})]
        calls += [("linear", {"x": x, "weight": torch.ones(5, shape[-1]), "bias": torch.ones(5)})]
    none = torch.zeros(0, dtype=torch.int64)
    for reduction in ("mean", "sum", "none"):
        calls += [
            ("cross_entropy", {"logits": torch.ones(0, 7), "labels": none, "reduction": reduction}),
            (
                "fused_linear_cross_entropy",
                {
                    "hidden": torch.ones(0, 5), "weight": torch.ones(7, 5), "labels": none, "reduction": reduction,
                    "chunk_size": 2,
                },
            ),
        ]  # fmt: skip
    for rows, inner, width, experts in ((0, 4, 5, 2), (3, 0, 5, 2), (3, 4, 0, 2), (3, 4, 5, 0)):
        sizes_of_groups = torch.full((experts,), 1 if rows else 0)
        tensors = {"x": torch.ones(rows, inner), "weight": torch.ones(experts, inner, width)}
        calls.append(
            ("grouped_matmul", {**tensors, "group_sizes": sizes_of_groups, "bias": torch.ones(experts, width)})
        )
    for length in (1, 70):
        for batch, channels, state in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
            x, rows = torch.ones(batch, length, channels), torch.ones(batch, length, state)
            calls.append(("ssm1", {"x": x, "dt": x, "A": -torch.ones(channels, state), "B": rows, "C": rows}))
            x, rows = torch.ones(batch, length, 2 * channels, 3), torch.ones(batch, length, 1, state)
            calls.append(("ssm2", {"x": x, "dt": x[..., 0], "A": -torch.ones(2 * channels), "B": rows, "C": rows}))
            value, g = torch.ones(batch, length, 2 * channels, state), -torch.ones(batch, length, 2 * channels)
            key = torch.ones(batch, length, 2, 4)
            calls.append(("gated_delta_rule", {"query": key, "key": key, "value": value, "g": g, "beta": -g}))
    return calls


@pytest.mark.parametrize(("name", "arguments"), _zero_sizes(), ids=lambda x: x if isinstance(x, str) else "")
def test_sizes_of_zero(name: str, arguments: dict[str, Any]) -> None:
    expected = _results(name, "native", {n: _plain(x) for n, x in arguments.items()})
    for implementation in fuzz.implementations(name):
        if not fuzz.carries(fuzz.Case(name, arguments), implementation):
            refusal = fuzz.run(name, implementation, arguments)
            assert isinstance(refusal, UnsupportedOperationError), refusal
            continue
        got = _results(name, implementation, arguments)
        for field, want in expected.items():
            if field.startswith("gradient") and field not in got:  # ATen records none of a bias where nothing is added
                assert not want.any()
                continue
            torch.testing.assert_close(got[field].double(), want, rtol=1e-4, atol=1e-5)
        apart = fuzz.run(name, implementation, {n: _laid_out(x, "apart") for n, x in arguments.items()})
        assert not isinstance(apart, Exception), apart  # to `contiguous` a tensor without numbers is as it should be
        for field, tensor in enumerate(apart):
            torch.testing.assert_close(tensor.double(), expected[f"output {field}"], rtol=1e-4, atol=1e-5)
