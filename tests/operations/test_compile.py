"""Every operation inside torch.compile(fullgraph=True) and torch.export: same result, same gradient, same type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.operations import AttentionOutput, OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "rms_norm": ("rms_norm", None, {}),
    "rotary": ("rotary", None, {}),
    "automatic": ("attention", None, {"causal": True}),
    "vanilla": ("attention", "vanilla", {"causal": True, "softcap": 3.0}),
    "sdpa": ("attention", "sdpa", {"causal": True, "sliding_window": 9}),
    "flash_native": ("attention", "flash:native", {"causal": True, "dropout_prob": 0.2, "seed": 3}),
    "flash_aten": ("attention", "flash:aten", {"causal": True, "softcap": 3.0}),
    "flash_xla": ("attention", "flash:xla", {"causal": True, "softcap": 3.0}),
}


class Module(torch.nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        name, backend, self.features = CASES[case]
        self.operation = OperationRegistry.create(name, OperationMetadata(backend=backend))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.operation(*args, **self.features)


def _inputs(case: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if case == "rms_norm":
        return [torch.randn(3, 5, 16), torch.randn(16)]
    q, k = torch.randn(1, 33, 4, 16), torch.randn(1, 33, 2, 16)
    return [q, k, torch.randn(1, 33, 16), torch.randn(1, 33, 16)] if case == "rotary" else [q, k, k.clone()]


def _first(result: Any) -> torch.Tensor:
    if isinstance(result, AttentionOutput):
        return result.attention_outputs
    return result[0] if isinstance(result, tuple) else result


def _run(function: Any, case: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    inputs = [x.requires_grad_() for x in _inputs(case)]
    result = function(*inputs)
    used = inputs if case != "rotary" else [inputs[0]]
    return result, torch.autograd.grad(_first(result).square().sum(), used)


@pytest.mark.parametrize("case", CASES)
def test_compile_fullgraph(case: str) -> None:
    if case == "flash_xla":
        pytest.importorskip("jax")
    torch._dynamo.reset()
    eager, eager_grads = _run(Module(case), case)
    # aot_eager traces forward and backward as inductor does, without the time of compiling C++
    compiled, grads = _run(torch.compile(Module(case), fullgraph=True, backend="aot_eager"), case)
    assert type(compiled) is type(eager)
    torch.testing.assert_close(_first(compiled), _first(eager))
    for got, expected in zip(grads, eager_grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("case", CASES)
def test_export(case: str) -> None:
    if case == "flash_xla":
        pytest.importorskip("jax")
    module, inputs = Module(case), tuple(_inputs(case))
    result = torch.export.export(module, inputs).module()(*inputs)
    expected = module(*inputs)
    assert type(result) is type(expected)
    torch.testing.assert_close(_first(result), _first(expected))


@pytest.mark.parametrize(
    ("operation", "dtype", "dynamic"),
    [
        ("sdpa", torch.float32, False), ("sdpa", torch.float32, True), ("sdpa", torch.bfloat16, False),
        ("decode", torch.float32, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_query_whose_rows_overlap_is_copied_in_a_graph_too(operation: str, dtype: torch.dtype, dynamic: bool) -> None:
    """ATen's kernels give such a query wrong results (float32) or refuse its gradient (bfloat16)."""
    torch.manual_seed(0)
    length = 1 if operation == "decode" else 33
    given = {name: torch.randn(3, 40, 2, 60).to(dtype) for name in ("key", "value")}
    strides = (9, 60, 1, 1) if length == 1 else (81, 1 if dtype == torch.float32 else 34, 9, 1)
    given["query"] = torch.randn(6000).to(dtype).as_strided((3, length, 4, 60), strides)

    attend = OperationRegistry.create("attention", OperationMetadata(backend=operation))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **tensors: attend(**tensors).attention_outputs, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    assert leaves["query"].stride() == given["query"].stride()
    output = compiled(**leaves)
    double = {n: x.detach().double().contiguous().requires_grad_() for n, x in given.items()}
    vanilla = OperationRegistry.create("attention", OperationMetadata(backend="vanilla"))
    expected = vanilla(**double).attention_outputs
    upstream = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(output, list(leaves.values()), upstream)
    wanted = torch.autograd.grad(expected, list(double.values()), upstream.double())
    for got, want in zip((output, *grads), (expected, *wanted), strict=True):
        assert relative_rms_error(got, want) <= TOLERANCE[dtype]


def test_sizes_that_are_symbols_fit_tables_and_masks_of_known_sizes() -> None:
    """A mask or table that the compiled function holds has numbers for sizes, beside the caller's symbols."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 33, 4, 16), torch.randn(2, 33, 2, 16), torch.randn(2, 33, 2, 16)
    cos, sin, ids = torch.randn(2, 33, 16), torch.randn(2, 33, 16), torch.arange(33).repeat(2, 1)
    mask, bias = torch.rand(2, 1, 33, 33) < 0.7, torch.randn(2, 4, 33, 33)
    attend, turn = OperationRegistry.create("attention"), OperationRegistry.create("rotary")

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = *turn(query, key, cos, sin), *turn(query, key, cos[0], sin[0], position_ids=ids)
        return *turned, attend(query, key, value, mask=mask, bias=bias).attention_outputs

    expected = call(query, key, value)
    for tensor in (query, key, value):
        for dim in (0, 1):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(query, key, value), expected, strict=True):
        torch.testing.assert_close(got, want)
