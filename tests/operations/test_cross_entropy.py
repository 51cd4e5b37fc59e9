"""cross_entropy and fused_linear_cross_entropy: dispatch, float64 losses and gradients, torch's own loss, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from easytorch.kernels.interop import installed
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["cross_entropy", "fused_linear_cross_entropy"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 5},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed_none": {"label_smoothing": 1.0, "reduction": "none"},
    "capped": {"softcap": 2.0},
    "z_loss": {"z_loss": 0.01, "reduction": "sum"},
    "everything": {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.05, "ignore_index": 7, "reduction": "none"},
}


def loss(name: str = "cross_entropy", backend: str | None = None, **metadata: Any) -> OperationImpl:
    return OperationRegistry.create(name, OperationMetadata(backend=backend, **metadata))


def textbook(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """By the cross entropy with a smoothed distribution, row by row, in float64."""
    losses = []
    for row, label in zip(logits.flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label == ignore_index:
            losses.append(row.sum() * 0)
            continue
        z = row if softcap is None else softcap * torch.tanh(row / softcap)
        target = torch.full_like(z, label_smoothing / len(z))
        target[label] += 1 - label_smoothing
        losses.append(-(target * z.log_softmax(0)).sum() + z_loss * z.exp().sum().log() ** 2)
    stacked = torch.stack(losses).reshape(labels.shape)
    if reduction == "mean":
        return stacked.sum() / (labels != ignore_index).sum()
    return stacked.sum() if reduction == "sum" else stacked


def labelled(vocabulary: int, options: dict[str, Any]) -> torch.Tensor:
    labels = torch.randint(0, vocabulary, (3, 7))
    labels[0, 1] = labels[2, 4] = options.get("ignore_index", -100)
    return labels


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert relative_rms_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("forced", [None, "native"])
def test_cross_entropy_and_gradients(forced: str | None, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 7, 61).mul(3).to(dtype).requires_grad_(), labelled(61, options)
    wide = logits.detach().double().requires_grad_()
    got, expected = loss(backend=forced)(logits, labels, **options), textbook(wide, labels, **options)
    assert got.dtype == torch.float32
    upstream = torch.randn(got.shape)
    grad = torch.autograd.grad(got, logits, upstream)[0]
    assert grad.dtype == dtype
    assert_close([got, grad], [expected, torch.autograd.grad(expected, wide, upstream.double())[0]], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [5, None], ids=["chunks", "whole"])
def test_fused_and_gradients(
    chunk_size: int | None, with_bias: bool, options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    shapes = [(3, 7, 30), (61, 30), (61,)][: 3 if with_bias else 2]
    # scores near zero: what 16 bits round of a score enters its exponential as it is
    tensors = [torch.randn(shape).mul(0.3).to(dtype).requires_grad_() for shape in shapes]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    labels = labelled(61, options)
    got = loss("fused_linear_cross_entropy")(*tensors[:2], labels, *tensors[2:], **options, chunk_size=chunk_size)
    expected = textbook(F.linear(*wide), labels, **options)
    assert got.dtype == torch.float32
    upstream = torch.randn(got.shape)
    grads = torch.autograd.grad(got, tensors, upstream)
    assert all(grad.dtype == dtype for grad in grads)
    assert_close([got, *grads], [expected, *torch.autograd.grad(expected, wide, upstream.double())], dtype)


@pytest.mark.parametrize("level", [2.0**22, -(2.0**22)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("forced", [None, "native"])
def test_logits_that_are_large_throughout(forced: str | None, options: dict[str, Any], level: float) -> None:
    """A float32 logsumexp beside 2**22 is rounded to quarters; what is above the largest logit is not."""
    hidden, labels = torch.tensor([[level, 1.0]]).repeat(9, 1), torch.arange(9)
    weight = torch.stack([torch.ones(61), torch.arange(61.0) % 5], 1)  # the products are exact
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels, **options)
    grads = torch.autograd.grad(expected.sum(), exact)
    leaf = F.linear(hidden, weight).requires_grad_()
    got = loss(backend=forced)(leaf, labels, **options)
    assert_close([got], [expected], torch.float32)
    assert_close([torch.autograd.grad(got.sum(), leaf)[0].T @ hidden], [grads[1]], torch.float32)
    for chunk_size in (4, None):
        tensors = [x.clone().requires_grad_() for x in (hidden, weight)]
        got = loss("fused_linear_cross_entropy", forced)(*tensors, labels, **options, chunk_size=chunk_size)
        assert_close([got], [expected], torch.float32)
        assert_close([torch.autograd.grad(got.sum(), tensors)[1]], [grads[1]], torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("forced", [None, "native"])
def test_the_loss_of_torch(forced: str | None, reduction: str) -> None:
    logits, labels = torch.randn(9, 30, dtype=torch.float64), torch.randint(0, 30, (9,))
    labels[3] = -100
    got = loss(backend=forced)(logits, labels, label_smoothing=0.1, reduction=reduction)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction))


@pytest.mark.parametrize("forced", [None, "native"])
def test_a_batch_of_nothing_loses_nothing(forced: str | None) -> None:
    logits, weight = torch.randn(4, 8).requires_grad_(), torch.randn(8, 8)
    labels = torch.full((4,), -100)
    for result in (
        loss(backend=forced)(logits, labels),
        loss("fused_linear_cross_entropy", forced)(logits, weight, labels),
    ):
        assert result.item() == 0.0
        assert torch.equal(torch.autograd.grad(result, logits)[0], torch.zeros(4, 8))


@pytest.mark.parametrize("name", NAMES)
def test_a_label_outside_of_the_vocabulary_is_an_error(name: str) -> None:
    call = [torch.randn(4, 8)] if name == "cross_entropy" else [torch.randn(4, 8), torch.randn(8, 8)]
    for label in (8, -1, -101):
        with pytest.raises(ValueError, match=rf"labels must be in 0\.\.7 or ignore_index = -100, got .*{label}"):
            loss(name)(*call, torch.tensor([0, -100, label, 2]))
    assert loss(name)(*call, torch.tensor([0, 9, 9, 2]), ignore_index=9).isfinite()


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "labels"),
        (torch.zeros(4), {}, "int32 or int64"),
        (torch.zeros(4, dtype=torch.int64), {"label_smoothing": 1.5}, "label_smoothing must be in"),
        (torch.zeros(4, dtype=torch.int64), {"softcap": 0.0}, "softcap must be positive"),
        (torch.zeros(4, dtype=torch.int64), {"z_loss": -1.0}, "z_loss must not be negative"),
        (torch.zeros(4, dtype=torch.int64), {"z_loss": torch.ones(2)}, "z_loss must be"),
        (torch.zeros(4, dtype=torch.int64), {"reduction": "avg"}, "one of mean, sum, none, got 'avg'"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str, labels: torch.Tensor, options: dict[str, Any], message: str) -> None:
    call = [torch.randn(4, 8)] if name == "cross_entropy" else [torch.randn(4, 8), torch.randn(8, 8)]
    with pytest.raises((TypeError, ValueError), match=message):
        loss(name)(*call, labels, **options)


def test_errors_of_the_fused_loss() -> None:
    fused, hidden, weight = loss("fused_linear_cross_entropy"), torch.randn(4, 8), torch.randn(30, 8)
    labels = torch.zeros(4, dtype=torch.int64)
    for call in ((hidden, weight.T, labels), (hidden, weight, labels, torch.zeros(8)), (hidden, weight[0], labels)):
        with pytest.raises(ValueError, match=r"takes hidden \(\.\.\., D\), weight \(V, D\)"):
            fused(*call)
    with pytest.raises(ValueError, match=r"of one dtype, got torch\.bfloat16, torch\.float32"):
        fused(hidden.bfloat16(), weight, labels)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        fused(hidden, weight, labels, chunk_size=0)


def test_what_aten_lacks_goes_to_the_definition() -> None:
    logits, labels = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    assert loss().choose(logits, labels).backend == "aten"
    for options, reason in (({"softcap": 2.0}, "ATen has no softcap"), ({"z_loss": 0.1}, "ATen has no z_loss")):
        choice = loss().choose(logits, labels, **options)
        assert choice.backend == "native" and reason in choice.reason
        with pytest.raises(UnsupportedOperationError, match=reason):
            loss(backend="aten")(logits, labels, **options)
    explicit = loss(backend="aten")(logits, labels, softcap=None, z_loss=0.0)
    torch.testing.assert_close(explicit, F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("name", "cpu", "tpu"),
    [("cross_entropy", "aten", "native"), ("fused_linear_cross_entropy", "native", "xla")],
)
def test_the_path_of_each_platform(name: str, cpu: str, tpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    call = loss(name).typical_call()
    assert call is not None
    found = {platform: loss(name).choose_on(platform, *call).backend for platform in PLATFORMS}
    assert found == {"cpu": cpu, "cuda": "triton", "rocm": "triton", "tpu": tpu}
    assert "float64" in loss(name, runtime_dtype=torch.float64).choose_on("cuda", *call).reason
    real = [torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)]
    with pytest.raises(UnsupportedOperationError, match="runs on cuda, rocm, the tensors are on cpu"):
        loss(name, "triton")(*real[-len(call[0]) :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_check_mode(options: dict[str, Any], dtype: torch.dtype, compared: list[str]) -> None:
    labels, weight = labelled(61, options), torch.randn(61, 16, dtype=dtype)
    loss()(torch.randn(3, 7, 61, dtype=dtype), labels, **options)
    loss("fused_linear_cross_entropy")(torch.randn(3, 7, 16, dtype=dtype), weight, labels, **options, chunk_size=4)
    assert [name.partition(":")[0] for name in compared] == ["cross_entropy", "fused_linear_cross_entropy"]


def test_runtime_dtype_and_autocast() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(0, 30, (4,))
    fused, half = loss("fused_linear_cross_entropy"), [hidden.bfloat16(), weight.bfloat16()]
    expected = fused(*half, labels)
    torch.testing.assert_close(
        loss("fused_linear_cross_entropy", runtime_dtype=torch.bfloat16)(hidden, weight, labels), expected
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = fused(hidden, half[1], labels)
    torch.testing.assert_close(got, expected)
    assert [grad.dtype for grad in torch.autograd.grad(got, (hidden, weight))] == [torch.float32] * 2
    assert loss(runtime_dtype=torch.bfloat16)(hidden, labels % 8).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_compile_and_export(name: str) -> None:
    operation, labels = loss(name), torch.randint(0, 8, (4,))
    tensors = (torch.randn(4, 8),) if name == "cross_entropy" else (torch.randn(4, 8), torch.randn(8, 8))

    class Module(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return operation(*args, label_smoothing=0.1)

    expected = operation(*tensors, labels, label_smoothing=0.1)
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, labels), expected)
    torch.testing.assert_close(torch.export.export(Module(), (*tensors, labels)).module()(*tensors, labels), expected)
