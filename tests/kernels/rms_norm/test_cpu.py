"""rms_norm by the operator in C++: every instruction set this CPU has, odd sizes, any layout, the ends of the range."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.rms_norm import cpu, native
from easytorch.layers.norm import RMSNorm
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create("rms_norm", OperationMetadata(backend=backend))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("rms_norm"))
def test_odd_sizes_at_every_level(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for n in (1, 7, 8, 15, 16, 31, 33, 60, 64, 65, 128, 1000):
        x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, n), (n,)))
        for scale in (weight, None):
            got = cpu.run(guarded(x), None if scale is None else guarded(scale), 1e-5, level)
            expected = native.rms_norm(x.double(), None if scale is None else scale.double(), 1e-5)
            assert got.dtype == dtype and got.is_contiguous()
            assert relative_rms_error(got, expected) <= TOLERANCE[dtype], n


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(dtype: torch.dtype) -> None:
    wide = torch.randn(40, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = [
        wide[:3, :130], wide[:3, 1:131], wide[:3, ::2][:, :130], wide.t()[:130, :5].t(), wide[:1, :130].expand(4, 130),
        wide[:, :130].view(2, 4, 5, 130)[:, 1:3, ::2], wide[0, :130], wide[:0, :130], wide[:4, :1].expand(4, 130),
        torch.empty(2, 0, 130, dtype=dtype), torch._neg_view(wide[:2, :130]),
    ]  # fmt: skip
    for x in inputs:
        for weight in (
            None,
            wide[5, 3:133],
            wide[7, ::3][:130],
            wide[0, :1].expand(130),
            torch._neg_view(wide[1, :130]),
        ):
            expected = native.rms_norm(x.double(), None if weight is None else weight.double(), 1e-5)
            got = rms_norm("cpu")(x, weight, 1e-5)
            assert got.shape == expected.shape and got.dtype == dtype
            assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
    assert rms_norm("cpu")(wide[:3, :0]).shape == (3, 0)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("rms_norm"))
def test_the_ends_of_the_range_are_the_definitions(level: int, dtype: torch.dtype) -> None:
    """Infinities, NaN, rows of zeros without eps, and numbers whose squares overflow or vanish."""
    largest = torch.finfo(dtype).max
    rows = torch.ones(8, 130, dtype=dtype)
    rows[0, 3], rows[1, 129], rows[2, 0], rows[3], rows[4] = float("inf"), float("nan"), float("-inf"), 0.0, largest
    rows[5], rows[6, :2] = torch.finfo(dtype).tiny, torch.tensor([-0.0, 65504.0])
    weight = torch.linspace(-2, 2, 130).to(dtype)
    for eps in (0.0, 1e-6):
        for scale in (None, weight):
            got, expected = cpu.run(rows, scale, eps, level), native.rms_norm(rows, scale, eps)
            torch.testing.assert_close(got, expected, equal_nan=True)


@needs_library
def test_rounding_is_the_definitions() -> None:
    """One row whose root mean square is 1: what is left is rounding to 16 bits, before the weight and after it."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(64, 256, generator=generator).sign().to(dtype)
        weight = torch.randn(256, generator=generator).to(dtype)
        for level in range(len(library.LEVELS)):
            assert torch.equal(cpu.run(x, weight, 0.0, level), native.rms_norm(x, weight, 0.0))
            assert torch.equal(cpu.run(x * 3, weight, 4.0, level), native.rms_norm(x * 3, weight, 4.0))


@needs_library
def test_many_rows_by_several_threads() -> None:
    x = torch.randn(700, 129, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            torch.testing.assert_close(cpu.run(x, None, 1e-6, library.BEST), native.rms_norm(x))
    finally:
        torch.set_num_threads(threads)


@needs_library
def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    operation: OperationImpl = rms_norm()
    for dtype in DTYPES:
        x, weight = torch.ones(2, 256, dtype=dtype), torch.ones(256, dtype=dtype)
        assert operation.choose(x, weight).backend == "cpu"
        assert operation.choose(x=x, eps=1e-3).backend == "cpu"
        assert operation.choose(x.requires_grad_(), weight).backend == "cpu"
        with torch.no_grad():
            assert operation.choose(x, weight).backend == "cpu"
    for x, weight in (
        (torch.ones(2, 64), torch.ones(64)),
        (torch.ones(2, 256).double(), None),
        (torch.ones(2, 256).bfloat16(), torch.ones(256)),
        (torch.ones(2, 256, device="meta"), None),
        (torch.ones(2, 256).as_subclass(type("Other", (torch.Tensor,), {})), None),
    ):
        assert operation.choose(x, weight).backend != "cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(torch.ones(2, 256)).backend == "cpu"
        assert operation(torch.ones(2, 256)).dtype is torch.float32, "nothing is cast"
    torch.func.vmap(lambda row: operation(row))(torch.ones(2, 256))
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(torch.ones(2, 256)).backend == "aten"


@needs_library
def test_a_forced_call_that_it_does_not_take_is_refused() -> None:
    leaf = torch.ones(2, 256)
    for x, weight, why in (
        (leaf.double(), None, "float64"),
        (leaf.half(), torch.ones(256), "one dtype"),
    ):
        with pytest.raises(UnsupportedOperationError, match=why):
            rms_norm("cpu")(x, weight)
        with pytest.raises(NotImplementedError, match=why):
            cpu.rms_norm(x, weight)
    with pytest.raises(ValueError, match="weight must be"):
        cpu.rms_norm(torch.ones(2, 256), torch.ones(255))


@needs_library
def test_the_layer_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    layer = RMSNorm(256).to(torch.bfloat16)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), cpu.run(x, layer.weight, layer.variance_epsilon, library.BEST))
    got = layer(x)
    assert got.requires_grad
    torch.testing.assert_close(got, native.rms_norm(x, layer.weight, layer.variance_epsilon))


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    """By itself, past every check in Python: nothing is read beyond a tensor."""
    x, weight = torch.ones(2, 8), torch.ones(8)
    operator = torch.ops.easytorch_cpu.rms_norm.default
    assert operator(x, weight, 1e-6, library.BEST).shape == (2, 8)
    for given, scale in (
        (x, weight[:7]), (x, weight[:1]), (x, torch.ones(16)[::2]), (x, weight[None]), (x, weight.bfloat16()),
        (x[:, ::2], weight[:4]), (x.double(), weight.double()), (x[0, 0], weight),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="easytorch: rms_norm"):
            operator(given, scale, 1e-6, library.BEST)
