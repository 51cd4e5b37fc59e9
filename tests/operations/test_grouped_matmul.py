"""grouped_matmul: every expert's rows, against a loop and jax; gradients, tracing, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easytorch.kernels.grouped_matmul import aten
from easytorch.kernels.grouped_matmul.routing import combine_experts, sort_by_expert
from easytorch.kernels.interop import installed
from easytorch.kernels.linear import preference
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORCED = ["aten", "native"]
SIZES = {
    "uneven, one empty, rows left over": [7, 0, 30, 1, 20],
    "all of them": [63, 0],
    "none": [0, 0, 0],
    "one row each": [1, 1, 1, 1],
}


def grouped(backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create("grouped_matmul", OperationMetadata(backend=backend, **metadata))


def operands(
    experts: int, rows: int = 63, depth: int = 60, width: int = 36, *, transposed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:  # fmt: skip
    shapes = [(rows, depth), (experts, *((width, depth) if transposed else (depth, width))), (experts, width)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def loop(x: torch.Tensor, weight: torch.Tensor, sizes: list[int], bias: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Expert by expert, the rest zeros."""
    parts = x.split([*sizes, len(x) - sum(sizes)])
    matrices = weight.transpose(1, 2) if transposed else weight
    products = [part @ matrix + added for part, matrix, added in zip(parts, matrices, bias, strict=False)]
    return torch.cat([*products, x.new_zeros(len(parts[-1]), bias.shape[1])])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("forced", FORCED)
def test_outputs_and_gradients(forced: str, sizes: list[int], transposed: bool, dtype: torch.dtype) -> None:
    tensors = operands(len(sizes), transposed=transposed, dtype=dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got = grouped(forced)(*tensors[:2], torch.tensor(sizes), tensors[2], transposed=transposed)
    expected = loop(*wide[:2], sizes, wide[2], transposed)
    assert got.dtype == dtype
    upstream = torch.randn(got.shape).to(dtype)
    grads = torch.autograd.grad(got, tensors, upstream)
    want = torch.autograd.grad(expected, wide, upstream.double())
    for a, b in zip((got, *grads), (expected, *want), strict=True):
        assert a.shape == b.shape
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("forced", FORCED)
def test_rows_of_no_group_may_hold_anything(forced: str) -> None:
    x, weight, bias = operands(2, rows=9)
    with torch.no_grad():
        x[5:] = float("nan")
    output = grouped(forced)(x, weight, torch.tensor([2, 3], dtype=torch.int32), bias)
    assert torch.equal(output[5:], torch.zeros(4, 36))
    grads = torch.autograd.grad(output.square().sum(), (x, weight, bias))
    assert all(grad.isfinite().all() for grad in grads)
    assert torch.equal(grads[0][5:], torch.zeros(4, 60))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 9, 64])
def test_float16_by_either_way_of_the_cpu(rows: int, transposed: bool) -> None:
    x, weight, bias = operands(3, rows=3 * rows, transposed=transposed, dtype=torch.float16)
    got = grouped("aten")(x, weight, torch.tensor([rows] * 3), bias, transposed=transposed)
    expected = loop(x.double(), weight.double(), [rows] * 3, bias.double(), transposed)
    assert relative_rms_error(got, expected) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("transposed", [False, True])
def test_large_groups_by_onednn(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_ONEDNN_WORK", 0)
    monkeypatch.setattr(preference, "prefers_onednn", lambda *_: True)
    tensors = operands(3, transposed=transposed)
    got = grouped("aten")(*tensors[:2], torch.tensor([40, 0, 20]), tensors[2], transposed=transposed)
    expected = loop(*tensors[:2], [40, 0, 20], tensors[2], transposed)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(output.square().sum(), tensors) for output in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_summed_over_many_rows(dtype: torch.dtype) -> None:
    """A sum kept in 16 bits would be percents off."""
    x, weight, bias = operands(2, rows=4096, depth=8, width=4, dtype=dtype)
    output = grouped()(x, weight, torch.tensor([4000, 96]), bias)
    upstream = (torch.randn(output.shape) + 1).to(dtype)
    got = torch.autograd.grad(output, (weight, bias), upstream)
    parts, x_parts = (t.double().split([4000, 96]) for t in (upstream, x.detach()))
    for index in range(2):
        assert relative_rms_error(got[0][index], x_parts[index].T @ parts[index]) <= TOLERANCE[dtype]
        assert relative_rms_error(got[1][index], parts[index].sum(0)) <= TOLERANCE[dtype]


def test_jax_ragged_dot() -> None:
    jax = pytest.importorskip("jax")
    x, weight, _ = operands(4)
    sizes = torch.tensor([10, 0, 33, 20])
    arrays = [jax.numpy.asarray(t.detach().numpy()) for t in (x, weight, sizes.int())]
    expected = torch.tensor(jax.device_get(jax.lax.ragged_dot(*arrays, precision="highest")).copy())
    torch.testing.assert_close(grouped()(x, weight, sizes).detach(), expected, rtol=1e-4, atol=1e-4)


def test_the_grouped_matmul_of_torch() -> None:
    x, weight, _ = operands(3, rows=32, depth=32, width=16, dtype=torch.bfloat16)
    sizes = torch.tensor([5, 20, 7])
    expected = torch._grouped_mm(x, weight, offs=sizes.cumsum(0).to(torch.int32))
    torch.testing.assert_close(grouped()(x, weight, sizes), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_differentiates_twice(transposed: bool) -> None:
    x, weight, bias = operands(3, rows=7, depth=4, width=3, transposed=transposed, dtype=torch.float64)
    operation, sizes = grouped("aten"), torch.tensor([2, 0, 4])

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return operation(tensors[0], tensors[1], sizes, tensors[2], transposed=transposed)

    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), depth=st.integers(1, 33), width=st.integers(1, 33),
    rest=st.integers(0, 5), transposed=st.booleans(),
)  # fmt: skip
def test_any_shape(sizes: list[int], depth: int, width: int, rest: int, transposed: bool) -> None:
    tensors = operands(len(sizes), sum(sizes) + rest, depth, width, transposed=transposed)
    outputs = [grouped(f)(*tensors[:2], torch.tensor(sizes), tensors[2], transposed=transposed) for f in FORCED]
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(output.square().sum(), tensors) for output in outputs]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_sorting_and_combining_are_a_mixture_of_experts() -> None:
    tokens, k, experts = 11, 2, 5
    hidden, weight = torch.randn(tokens, 8), torch.randn(experts, 8, 6)
    chosen = torch.rand(tokens, experts).topk(k).indices
    shares = torch.rand(tokens, k)
    order, sizes = sort_by_expert(chosen, experts)
    assert sizes.tolist() == [(chosen == e).sum().item() for e in range(experts)]
    rows = grouped()(hidden[order // k], weight, sizes)
    expected = torch.stack([
        sum(shares[t, i] * (hidden[t] @ weight[chosen[t, i]]) for i in range(k)) for t in range(tokens)
    ])  # fmt: skip
    torch.testing.assert_close(combine_experts(rows, order, shares), expected)


def test_no_tokens_are_a_mixture_of_none() -> None:
    order, sizes = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3)
    rows = grouped()(torch.ones(0, 4), torch.ones(3, 4, 6), sizes)
    assert combine_experts(rows, order, torch.ones(0, 2)).shape == (0, 6)


def test_an_expert_of_another_device_belongs_to_no_group() -> None:
    order, sizes = sort_by_expert(torch.tensor([[0, 9], [3, 1]]), 3)
    assert order.tolist() == [0, 3, 2, 1] or order.tolist() == [0, 3, 1, 2]
    assert sizes.tolist() == [1, 1, 0]
    rows = grouped()(torch.ones(4, 2), torch.ones(3, 2, 2), sizes)
    combined = combine_experts(rows, order, torch.ones(2, 2))
    assert torch.equal(combined, torch.full((2, 2), 2.0))
    with pytest.raises(ValueError, match=r"integer indices \(tokens, k\)"):
        sort_by_expert(torch.zeros(3), 4)


@pytest.mark.parametrize("forced", FORCED)
def test_errors(forced: str) -> None:
    operation, sizes = grouped(forced), torch.tensor([1, 2])
    x, weight, bias = (tensor.detach() for tensor in operands(2, rows=3))
    for call in (
        (x[0], weight, sizes), (x, weight[0], sizes), (x[:, 1:], weight, sizes), (x, weight, sizes[:1]),
        (x, weight, sizes, bias[0]), (x, weight.transpose(1, 2), sizes),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"takes x \(M, K\), weight \(E, K, N\)"):
            operation(*call)
    with pytest.raises(ValueError, match=r"weight \(E, N, K\)"):
        operation(x, weight, sizes, transposed=True)
    with pytest.raises(ValueError, match=r"int32 or int64, got torch\.float32"):
        operation(x, weight, sizes.float())
    with pytest.raises(ValueError, match=r"of one dtype, got torch\.bfloat16, torch\.float32"):
        operation(x.bfloat16(), weight, sizes)


def test_sizes_that_are_no_sizes() -> None:
    x, weight, _ = operands(2, rows=3)
    for sizes in ([2, 2], [-1, 2]):
        with pytest.raises(ValueError, match=r"nor sum to more than the 3 rows of x, got \["):
            grouped()(x, weight, torch.tensor(sizes))


def test_compile_export_checkpoint_and_opcheck() -> None:
    operation, tensors, sizes = grouped(), operands(3, rows=8), torch.tensor([3, 0, 4])

    class Module(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor, bias: torch.Tensor
        ) -> torch.Tensor:
            return 2 * operation(x, weight, sizes, bias)

    call = (*tensors[:2], sizes, tensors[2])
    other = (*tensors[:2], torch.tensor([0, 8, 0]), tensors[2])
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Module(), call).module()
    for given_ in (call, other):
        expected = Module()(*given_)
        torch.testing.assert_close(compiled(*given_), expected)
        torch.testing.assert_close(exported(*given_), expected)
    grads = torch.autograd.grad(compiled(*call).square().sum(), tensors)
    torch.testing.assert_close(grads, torch.autograd.grad(Module()(*call).square().sum(), tensors))
    again = torch.utils.checkpoint.checkpoint(Module(), *call, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), tensors), grads)
    torch.library.opcheck(torch.ops.easytorch.aten_grouped_matmul.default, (*call, False))
    torch.library.opcheck(torch.ops.easytorch.aten_grouped_matmul.default, (*call[:3], None, False))
    torch.library.opcheck(torch.ops.easytorch.aten_grouped_weight_grad.default, (tensors[0], tensors[0], sizes))


def test_vmap_and_functional_gradients() -> None:
    operation, sizes = grouped(), torch.tensor([3, 4])
    x, weight, _ = (tensor.detach() for tensor in operands(2, rows=8, depth=5, width=3))
    batch = torch.randn(2, 8, 5)
    got = torch.func.vmap(lambda rows: operation(rows, weight, sizes))(batch)
    torch.testing.assert_close(got, torch.stack([operation(rows, weight, sizes) for rows in batch]))
    grad = torch.func.grad(lambda w: operation(x, w, sizes).square().sum())(weight)
    assert relative_rms_error(grad[0], 2 * x[:3].T @ (x[:3] @ weight[0])) < 1e-5
    with pytest.raises(UnsupportedOperationError, match=r"torch\.func"):
        torch.func.grad(lambda w: grouped("aten")(x, w, sizes).sum())(weight)
    per_example = torch.func.vmap(torch.func.grad(lambda rows: operation(rows, weight, sizes).square().sum()))(batch)
    assert relative_rms_error(per_example[1][:3], 2 * batch[1][:3] @ weight[0] @ weight[0].T) < 1e-5


def test_autocast_and_runtime_dtype() -> None:
    x, weight, bias = operands(2)
    sizes = torch.tensor([30, 33])
    halves = [tensor.detach().bfloat16() for tensor in (x, weight, bias)]
    expected = grouped()(*halves[:2], sizes, halves[2])
    torch.testing.assert_close(grouped(runtime_dtype=torch.bfloat16)(x, weight, sizes, bias), expected)
    with torch.autocast("cpu", torch.bfloat16):
        got = grouped()(x, halves[1], sizes, bias)
    torch.testing.assert_close(got, expected)
    assert [grad.dtype for grad in torch.autograd.grad(got.sum(), (x, bias))] == [torch.float32] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_mode(dtype: torch.dtype, compared: list[str]) -> None:
    x, weight, bias = operands(3, dtype=dtype)
    grouped("aten")(x, weight, torch.tensor([20, 0, 40]), bias)
    assert compared == ["grouped_matmul:aten"]


def test_the_path_of_each_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for library in ("triton", "jax"):
        monkeypatch.setitem(installed.INSTALLED, library, True)
    call = grouped().typical_call()
    assert call is not None
    found = {platform: grouped().choose_on(platform, *call).backend for platform in PLATFORMS}
    assert found == {"cpu": "aten", "cuda": "triton", "rocm": "triton", "tpu": "pallas"}
    for platform in ("cuda", "tpu"):
        assert "float64" in grouped(runtime_dtype=torch.float64).choose_on(platform, *call).reason
    x, weight, _ = operands(1)
    with pytest.raises(UnsupportedOperationError, match="runs on cuda, rocm, the tensors are on cpu"):
        grouped("triton")(x, weight, torch.tensor([63]))
