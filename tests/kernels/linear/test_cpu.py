"""linear by the C++ operator: every instruction set this CPU has, odd sizes, any layout, nothing read past a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.linear import cpu, preference
from easytorch.layers.linear import argmax as layer_argmax
from easytorch.layers.linear import linear as layer_linear
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, level: int) -> torch.Tensor:
    none = torch.empty(0, dtype=x.dtype)
    return torch.ops.easytorch_cpu.linear.default(x, weight, none if bias is None else bias, level)


def linear(backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create("linear", OperationMetadata(backend=backend))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("linear"))
def test_every_number_of_rows_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for rows in (*range(1, 18), 33):
        for n, k in ((1, 1), (2, 31), (3, 32), (5, 33), (29, 100), (64, 256)):
            x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((rows, k), (n, k), (n,)))
            for added in (bias, None):
                expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
                error = relative_rms_error(operator(x, weight, added, level), expected)
                assert error <= TOLERANCE[dtype] / 2, f"{rows} rows, ({n}, {k}): {error}"


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 200, generator=generator).to(dtype)
    inputs = [
        wide[:3, :60], wide[:3, 1:61], wide[:3, ::2][:, :60], wide.t()[:60, :5].t(), wide[:1, :60].expand(4, 60),
        wide[:, :60].view(2, 4, 5, 60)[:, 1:3, ::2], wide[0, :60], wide[:0, :60], wide[:4, :1].expand(4, 60),
        torch.empty(2, 0, 60, dtype=dtype),
    ]  # fmt: skip
    weights = [
        wide[5:12, 3:63], wide[::3, 100:160], wide[:1, :60].expand(9, 60), wide[:, ::2][:, :60], wide.t()[:60].t(),
        wide[:1, 7:67], wide[:0, :60],
    ]  # fmt: skip
    for x in inputs:
        for weight in weights:
            for bias in (None, wide[: weight.shape[0], 2], wide[0, 3 : 3 + weight.shape[0]]):
                expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
                got = cpu.linear(x, weight, bias)
                assert got.shape == expected.shape
                assert got.dtype == dtype
                assert got.is_contiguous()
                assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
    assert cpu.linear(wide[:3, :0], wide[:5, :0], wide[0, :5]).tolist() == wide[:1, :5].expand(3, 5).tolist()


@needs_library
@pytest.mark.parametrize("level", library.levels_of("linear"))
def test_one_row_of_any_strides(level: int) -> None:
    """Of whole steps of columns, which the loops are given as they lie where they lie in one piece."""
    generator = torch.Generator().manual_seed(level)
    for dtype in DTYPES:
        for k in (32, 64, 100):
            wide, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((k, k), (5, k)))
            for x in (wide[:, 1], wide[:, 1:2].t(), wide[:1, :1].expand(1, k), wide[3:4], wide[None, :, 2:3].mT):
                expected = F.linear(x.double(), weight.double())
                assert relative_rms_error(operator(x, weight, None, level), expected) <= TOLERANCE[dtype] / 2, (
                    k,
                    x.stride(),
                )


@needs_library
@pytest.mark.parametrize("level", library.levels_of("linear"))
def test_rounding_infinities_and_nan(level: int) -> None:
    """Results are rounded to nearest even, over the whole range of the dtype."""
    numbers = torch.tensor([1.0, 1.00390625, 1.01171875, 65519.0, 65520.0, -7e4, 3.3e38, 1e-8, 5.97e-8, 3e-8, 2.98e-8,
                            6.1e-5, -0.0, float("inf"), float("-inf"), float("nan")])  # fmt: skip
    one = torch.ones(1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        # a bias is added in float32 and rounded once: 0 + number, where the number is one of the dtype
        given = numbers.to(dtype)
        got = operator(torch.zeros(1, 1, dtype=dtype), torch.ones(16, 1, dtype=dtype), given, level)[0]
        torch.testing.assert_close(got, given + 0.0, rtol=0, atol=0, equal_nan=True)
        a, b = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)[:, None], one.to(dtype) * 1.0078125
        torch.testing.assert_close(operator(a, b, None, level)[:, 0], (a.double() @ b.double())[:, 0].to(dtype))
    got = operator(one, numbers[:, None].contiguous(), None, level)[0]
    torch.testing.assert_close(got, numbers, rtol=0, atol=0, equal_nan=True)


@needs_library
def test_gradients_transforms_and_torchs_own_check() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((5, 6), (4, 6), (4,)))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    for given in (tuple(leaves), (*leaves[:2], None)):
        torch.library.opcheck(torch.ops.easytorch.cpu_linear.default, given)
    got, expected = linear("cpu")(*leaves), F.linear(*leaves)
    grad = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(expected, leaves, grad))
    dims = (0, None, None)
    many = torch.stack([x.detach(), -x.detach()])
    got = torch.func.vmap(torch.ops.easytorch.cpu_linear, dims)(many, weight.detach(), bias.detach())
    torch.testing.assert_close(got, F.linear(many, weight, bias).detach())


@needs_library
def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    monkeypatch.setattr(preference, "ONE_FLOAT32_ROW", True)
    few = {torch.float32: 8, torch.bfloat16: 16, torch.float16: 16}
    for dtype, rows in few.items():
        weight = torch.zeros(512, 512, dtype=dtype)
        assert linear().choose(torch.zeros(rows, 512, dtype=dtype), weight).backend == "cpu"
        assert linear().choose(x=torch.zeros(1, 512, dtype=dtype), weight=weight).backend == "cpu"
        for x, matrix in ((torch.zeros(rows + 1, 512), weight), (torch.zeros(1, 64), weight[:64, :64])):
            assert linear().choose(x.to(dtype), matrix).backend != "cpu"
        learned = weight.clone().requires_grad_()
        assert linear().choose(torch.zeros(1, 512, dtype=dtype), learned).backend != "cpu"
        with torch.no_grad():
            assert linear().choose(torch.zeros(1, 512, dtype=dtype), learned).backend == "cpu"
            with torch.autocast("cpu", torch.bfloat16):
                assert linear().choose(torch.zeros(1, 512, dtype=dtype), learned).backend != "cpu"
    for columns, backend in ((preference.ATEN_COLUMNS - 32, "cpu"), (preference.ATEN_COLUMNS, "aten")):
        x, weight = torch.zeros(1, columns).half(), torch.zeros(8, columns).half()
        assert linear().choose(x, weight).backend == backend
    monkeypatch.setattr(preference, "ONE_FLOAT32_ROW", False)
    for rows, backend in ((1, "aten"), (2, "cpu")):
        assert linear().choose(torch.zeros(rows, 511), torch.zeros(512, 511)).backend == backend
    assert linear().choose(torch.zeros(1, 512).bfloat16(), torch.zeros(512, 512).bfloat16()).backend == "cpu"
    monkeypatch.setattr(processor, "AVX2", False)
    assert linear().choose(torch.zeros(1, 512).bfloat16(), torch.zeros(512, 512).bfloat16()).backend == "aten"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_tensors_are_atens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    x, weight = torch.ones(2, 512, dtype=dtype), torch.eye(512, dtype=dtype)
    layer = torch.nn.Linear(512, 512, bias=False, dtype=dtype)
    layer.weight = torch.nn.Parameter(weight.to_sparse(), requires_grad=False)
    with torch.no_grad():
        assert torch.equal(layer_linear(layer, x), x)
        assert torch.equal(linear()(x, weight.to_sparse()), x)
        assert torch.equal(linear()(x.to_sparse(), weight), x)


@needs_library
def test_memory_that_was_freed_is_not_read() -> None:
    x, weight, bias = torch.zeros(2, 512), torch.zeros(512, 512), torch.zeros(512)
    for index in range(3):
        given = [x.clone(), weight.clone(), bias.clone()]
        for left in (given[index].numel() * 4 - 4, 0):
            given[index].untyped_storage().resize_(left)
            with pytest.raises(RuntimeError, match="memory was freed or has shrunk"):
                operator(*given, library.BEST)
    assert operator(x[:0], weight[:0], bias[:0], library.BEST).shape == (0, 0)


@needs_library
def test_what_it_does_not_carry_is_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(UnsupportedOperationError, match="float32, bfloat16 and float16, got torch"):
        linear("cpu")(x.double(), weight.double())
    with pytest.raises(UnsupportedOperationError, match="plain dense tensors"):
        linear("cpu")(x, weight.to_sparse())
    with pytest.raises(ValueError, match=r"x \(2, 7\) and weight \(4, 8\)"):
        linear("cpu")(x[:, :7], weight)
    with pytest.raises(ValueError, match="one floating dtype"):
        linear("cpu")(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"bias must be \(4,\)"):
        linear("cpu")(x, weight, torch.zeros(3))
    # the operator itself, past every check in Python
    for wrong in ((x[:, :7], weight, None), (x, weight.bfloat16(), None), (x, weight, torch.zeros(3)),
                  (x, weight[0], None), (x, torch.zeros(8, 4).t(), None), (x[:, :0], weight[:, :0], None),
                  (x, weight, torch.zeros(4).bfloat16()), (x.bfloat16(), weight, None),
                  (x, weight, torch.zeros(8)[::2]), (x, weight, torch.zeros(1, 4)),
                  (x.double(), weight.double(), None)):  # fmt: skip
        with pytest.raises(RuntimeError, match="easytorch: linear"):
            operator(*wrong, library.BEST)


@needs_library
def test_a_layer_of_a_model_takes_it_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    calls: list[tuple[int, ...]] = []
    run = cpu.run
    monkeypatch.setattr(cpu, "run", lambda x, *rest: (calls.append(tuple(x.shape)), run(x, *rest))[1])
    layer, x = torch.nn.Linear(256, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    layer_linear(layer, x)
    assert not calls  # gradients would be lost
    with torch.no_grad():
        assert torch.equal(layer_linear(layer, x), layer.bias.expand(1, 1, 128))
        assert calls == [(1, 1, 256)]
        layer_linear(layer, x.expand(17, 1, 256))
        layer_linear(layer.float(), x.float())  # small and float32: as torch rounds
        layer.bfloat16().register_forward_hook(lambda *_: None)
        layer_linear(layer, x)
        monkeypatch.setenv("EASYTORCH_OPS", "linear=native")
        layer_linear(torch.nn.Linear(256, 128, dtype=torch.bfloat16), x)
    assert len(calls) == 1


@needs_library
@pytest.mark.parametrize("level", library.levels_of("linear"))
def test_argmax_is_that_of_the_products(level: int) -> None:
    """Of equal numbers the first, NaN before all: over several blocks of the weight's rows, and a last one of few."""
    generator, none = torch.Generator().manual_seed(level), float("nan")
    for dtype in DTYPES:
        for n in (1, 7, 256, 700):
            x, weight = (torch.randint(-2, 3, s, generator=generator).to(dtype) for s in ((6, 33), (n, 33)))
            bias = torch.randint(-1, 2, (n,), generator=generator).to(dtype)
            x[0], bias[n // 2] = 0.0, bias[0]
            if n == 700:  # the row of zeros sees the biases alone
                bias[[300, 650]] = none
            for rows in (x, x[:1], x[1:2], x[:3, None], x[:0]):
                for added in (bias, torch.empty(0, dtype=dtype)):
                    got = torch.ops.easytorch_cpu.linear_argmax.default(rows, weight, added, level)
                    assert torch.equal(got, F.linear(rows, weight, added if added.numel() else None).argmax(-1))
    x, weight, bias = torch.zeros(2, 3), torch.ones(9, 3), torch.arange(18.0).flip(0)
    for w, b in ((weight, bias[::2]), (weight.t().contiguous().t(), bias[::2]), (weight[:, :1].expand(9, 3), bias[:9])):
        assert cpu.argmax(x, w, b).tolist() == [0, 0]  # wherever the numbers lie
    ends = torch.cat([bias[1::2], torch.full((9,), 20.0)])
    assert cpu.argmax(x, weight, ends[::2]).tolist() == [5, 5]
    with pytest.raises(RuntimeError, match="nothing to choose from"):
        torch.ops.easytorch_cpu.linear_argmax.default(torch.ones(1, 3), torch.ones(0, 3), torch.empty(0), level)


@needs_library
def test_argmax_of_a_layer_keeps_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    calls: list[tuple[int, ...]] = []
    run = cpu.argmax
    monkeypatch.setattr(cpu, "argmax", lambda x, *rest: (calls.append(tuple(x.shape)), run(x, *rest))[1])
    layer = torch.nn.Linear(256, 1000, dtype=torch.bfloat16)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = layer(x).argmax(-1)
        assert torch.equal(layer_argmax(layer, x), expected)
        assert calls == [(3, 256)]
        layer.register_forward_hook(lambda _, __, output: -output)
        assert torch.equal(layer_argmax(layer, x), layer_linear(layer, x).argmax(-1))
    assert len(calls) == 1


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for dtype in DTYPES:
            for rows, n, k in ((1, 1, 1), (1, 7, 33), (2, 5, 63), (5, 9, 65), (8, 3, 32), (16, 4, 31), (17, 2, 96)):
                x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((rows, k), (n, k), (n,)))
                got = operator(*(guarded(tensor) for tensor in (x, weight, bias)), level)
                assert relative_rms_error(got, F.linear(x.double(), weight.double(), bias.double())) <= TOLERANCE[dtype]
                given = [guarded(tensor) for tensor in (x, weight, bias)]
                assert torch.equal(torch.ops.easytorch_cpu.linear_argmax.default(*given, level), got.argmax(-1))


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.linear.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
