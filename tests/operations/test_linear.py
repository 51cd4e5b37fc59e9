"""linear: values and gradients in float64, the choice by CPU vendor and size, what oneDNN refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.linear import onednn
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

FORCED = [None, "native", "aten", "onednn", *(["cpu"] if library.missing() is None else [])]
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def linear(backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create("linear", OperationMetadata(backend=backend))


@pytest.fixture(params=["AuthenticAMD", "GenuineIntel"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(processor, "VENDOR", request.param)
    monkeypatch.setattr(processor, "AVX2", False)
    return request.param


@needs_onednn
@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(63, 60, 61), (1, 24, 8), (2, 3, 5, 7, 9), (10,), (0, 6, 5), (4, 0, 3)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], bias: bool, forced: str | None) -> None:
    torch.manual_seed(0)
    *rows, k, n = (*shape, 4) if len(shape) == 1 else shape
    leaves = [torch.randn(*rows, k), torch.randn(n, k), *([torch.randn(n)] if bias else [])]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    got, expected = linear(forced)(*leaves), F.linear(*wide)
    grad = torch.randn(expected.shape)
    grads = torch.autograd.grad(got, leaves, grad)
    grads64 = torch.autograd.grad(expected, wide, grad.double())
    for a, b in zip((got, *grads), (expected, *grads64), strict=True):
        assert a.shape == b.shape
        assert relative_rms_error(a, b) <= 1e-5
    with torch.no_grad():
        assert relative_rms_error(linear(forced)(*leaves), expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(7, 60).to(dtype), torch.randn(31, 60).to(dtype), torch.randn(31).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    for forced in ("native", "aten", None):
        assert relative_rms_error(linear(forced)(x, weight, bias), expected) <= TOLERANCE[dtype]
    with pytest.raises(UnsupportedOperationError, match="float32 only"):
        linear("onednn")(x, weight, bias)


@needs_onednn
def test_strides() -> None:
    for x in (torch.randn(60, 9).t(), torch.randn(9, 120)[:, ::2], torch.randn(1, 60).expand(9, 60)):
        for weight in (torch.randn(60, 31).t(), torch.randn(31, 120)[:, ::2], torch.randn(1, 60).expand(31, 60)):
            expected = F.linear(x.double(), weight.double())
            assert relative_rms_error(onednn.linear(x, weight), expected) <= 1e-5
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((9, 60), (31, 60)))
    onednn.linear(x, weight).sum().backward()  # a gradient of stride zero
    assert relative_rms_error(weight.grad, x.detach().sum(0).expand(31, 60)) <= 1e-5


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "n", "k", "training", "taken"),
    [
        (1, 64, 64, False, False),
        (1, 1024, 1024, False, True),
        (64, 1024, 1024, False, True),
        (64, 64, 64, False, False),
        (63, 1024, 1024, True, False),
        (64, 1024, 1024, True, True),
    ],
)
def test_the_choice(rows: int, n: int, k: int, training: bool, taken: bool, cpu: str) -> None:
    x, weight = torch.empty(rows, k), torch.empty(n, k, requires_grad=training)
    expected = "onednn" if taken and cpu == "AuthenticAMD" else "aten"
    assert linear().choose(x, weight).backend == expected
    assert linear().choose(weight=weight, x=x).backend == expected
    assert linear().choose(x.bfloat16(), weight.bfloat16()).backend == "aten"
    assert linear("onednn").choose(x, weight).backend == "onednn"
    assert linear("aten").choose(x, weight).backend == "aten"


def test_the_other_platforms_take_aten() -> None:
    call = linear().typical_call()
    assert call is not None
    assert {linear().choose_on(platform, *call).backend for platform in PLATFORMS if platform != "cpu"} == {"aten"}


def test_the_vendor_of_this_machine_is_known_or_empty() -> None:
    assert processor.VENDOR in ("AuthenticAMD", "GenuineIntel", "")


@needs_onednn
def test_autocast_transforms_and_forward_mode_go_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "VENDOR", "AuthenticAMD")
    operation, x, weight = linear(), torch.randn(3, 64, 1024), torch.randn(1024, 1024)
    assert operation.choose(x[0], weight).backend == "onednn"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation(x, weight).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(operation, (0, None))(x, weight), F.linear(x, weight))
    got = torch.func.grad(lambda w: operation(x[0], w).square().sum())(weight)
    torch.testing.assert_close(got, torch.func.grad(lambda w: F.linear(x[0], w).square().sum())(weight))
    in_a_graph = torch.compile(
        torch.func.grad(lambda w: operation(x[0], w).square().sum()), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(in_a_graph(weight), got)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], x[1])
        tangent = torch.autograd.forward_ad.unpack_dual(operation(dual, weight)).tangent
    torch.testing.assert_close(tangent, F.linear(x[1], weight))
    sparse = weight.to_sparse()
    assert onednn.supports(x[0], sparse) is not None
    with torch.backends.mkldnn.flags(enabled=False):
        assert operation.choose(x[0], weight).backend == "aten"
    monkeypatch.setattr(onednn, "_BUILT", False)
    assert operation.choose(x[0], weight).backend == "aten"


@needs_onednn
@pytest.mark.parametrize("training", [False, True])
def test_compile_and_export(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "VENDOR", "AuthenticAMD")

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1024, 512).requires_grad_(training)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear()(x, self.layer.weight, self.layer.bias)

    module, x = Module(), torch.randn(2, 64, 1024)
    expected = module.layer(x)
    got = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    torch.testing.assert_close(got, expected)
    program = torch.export.export(module, (x,))
    assert {str(n.target) for n in program.graph.nodes if n.op == "call_function"} == {"aten.linear.default"}
    if training:
        params = list(module.parameters())
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), params), torch.autograd.grad(expected.square().sum(), params),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@needs_onednn
def test_opcheck_and_second_derivatives() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((5, 6), (4, 6), (4,)))
    torch.library.opcheck(torch.ops.easytorch.onednn_linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.easytorch.onednn_linear.default, (x, weight, None))

    # integers this small are exact in float32: what is compared is the formula, not the order of its sums
    x, weight, bias = (torch.randint(-1, 2, t.shape).float().requires_grad_() for t in (x, weight, bias))

    def second(function) -> torch.Tensor:
        grad = torch.autograd.grad(function(x, weight, bias).pow(3).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    torch.testing.assert_close(second(onednn.linear), second(F.linear))


@needs_onednn
@pytest.mark.parametrize("dims", [(0, None, None), (1, None, None), (0, 0, 0), (None, 1, None), (0, None, 0)], ids=str)
def test_the_operator_under_vmap(dims: tuple[int | None, ...]) -> None:
    tensors = [torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)]
    given = [t if dim is None else torch.stack([t, -t, 2 * t], dim) for t, dim in zip(tensors, dims, strict=True)]
    got = torch.func.vmap(torch.ops.easytorch.onednn_linear, dims)(*given)
    torch.testing.assert_close(got, torch.func.vmap(F.linear, dims)(*given))


@pytest.mark.parametrize("forced", ["native", "onednn"])
def test_errors(forced: str) -> None:
    operation, x, weight = linear(forced), torch.randn(3, 6), torch.randn(4, 6)
    for arguments, message in (
        ((x, weight[:, :5]), r"x \(3, 6\) and weight \(4, 5\)"),
        ((x, weight[0]), r"weight \(6,\)"),
        ((x, weight, torch.ones(3)), r"bias must be \(4,\), got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            operation(*arguments)
    with pytest.raises(ValueError, match="one floating dtype"):
        linear("native")(x, weight.double())


@needs_onednn
def test_check_mode_and_runtime_dtype(compared: list[str], cpu: str) -> None:
    x, weight = torch.randn(64, 1024), torch.randn(512, 1024)
    for forced in FORCED:
        linear(forced)(x, weight)
    assert len(compared) == len(FORCED)
    half = OperationRegistry.create("linear", OperationMetadata(runtime_dtype=torch.bfloat16))
    assert half(x, weight).dtype == torch.bfloat16


def test_settings_keep_few_rows_from_the_cpp_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    x, weight = torch.randn(4, 1024), torch.randn(512, 1024)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        operation = OperationRegistry.create("linear", OperationMetadata(runtime_dtype=dtype))
        for given in (torch.float32, torch.bfloat16):
            assert operation.choose(x.to(given), weight.to(given)).backend != "cpu"


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("shape", [(), (2**19,), (2, 2, 2**18)])
def test_a_weight_that_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="weight"):
        linear()(torch.ones(2, 8), torch.ones(shape))


@needs_onednn
@pytest.mark.parametrize("forced", FORCED)
def test_a_strided_bias(forced: str | None) -> None:
    """oneDNN reads N numbers in a row: beside the bias there lies something else."""
    generator = torch.Generator().manual_seed(0)
    x, weight, pairs = (torch.randn(shape, generator=generator) for shape in ((3, 8), (5, 8), (5, 2)))
    with torch.no_grad():
        torch.testing.assert_close(
            linear(forced)(x, weight, pairs[:, 0]), F.linear(x, weight, pairs[:, 0].contiguous())
        )
