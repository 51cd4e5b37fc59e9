"""quantized_matmul by the C++ operator: every format on every instruction set here, nothing read past a tensor."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.quantized_matmul import cpu, native
from easytorch.kernels.quantized_matmul.formats import FORMATS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
SIZES = (
    (1, 1, "row"),
    (3, 300, 128),
    (12, 290, 32),
    (5, 33, 32),
    (13, 100, 64),
    (9, 64, "tensor"),
    (6, 257, "row"),
    (4, 200, 96),
    (3, 96, 32),
)


def weights(format: str, seed: int) -> list[QuantizedWeight]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n, k, group_size in SIZES:
        numbers = torch.randn(n, k, generator=generator)
        found.append(quantize(numbers, format, group_size))
        if format == "int4":
            found.append(quantize(numbers + 0.3, format, group_size, symmetric=False))
    return found


@needs_library
@pytest.mark.parametrize("format", cpu.FORMATS)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_every_format_and_number_of_rows(level: int, format: str) -> None:
    generator = torch.Generator().manual_seed(level)
    for weight in weights(format, level):
        n, k = weight.shape
        for rows in (1, 2, 3, 4, 5, 8, 11):
            x, bias = torch.randn(rows, k, generator=generator), torch.randn(n, generator=generator)
            for dtype in cpu.DTYPES:
                given = x.to(dtype)
                for added in (None, bias, bias.double()):
                    expected = native.quantized_matmul(
                        given.double(), weight, None if added is None else added.double()
                    )
                    error = relative_rms_error(cpu.run(given, weight, added, level), expected)
                    # of more rows the weight is rounded to bfloat16, as ATen's path does
                    limit = TOLERANCE[dtype] / (1 if rows > 4 and dtype == torch.bfloat16 else 2)
                    assert error <= limit, f"{rows} rows of {dtype}, {weight.shape}: {error}"


@needs_library
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_every_code(level: int) -> None:
    """All 256 bytes of a format, NaN and subnormal numbers among them, at every place of a step."""
    for format in cpu.FORMATS:
        stored = torch.arange(256, dtype=torch.uint8).roll(5 * level)
        if FORMATS[format].packed:
            weight = QuantizedWeight(stored.view(8, 32), torch.full((8, 1), 0.5), None, format, (8, 64), 64)
        else:
            dtype = {"int8": torch.int8, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[format]
            weight = QuantizedWeight(stored.view(dtype).view(8, 32), torch.full((8, 1), 0.5), None, format, (8, 32), 32)
        # each column alone: no NaN of another reaches it
        for rows in (1, 4):
            numbers = weight.dequantize()
            for column in range(0, weight.shape[1], rows):
                x = torch.zeros(rows, weight.shape[1])
                x[range(rows), range(column, column + rows)] = 1.0
                finite = numbers.nan_to_num(0.0, 0.0, 0.0)
                got = cpu.run(x, weight, None, level)
                clean = numbers.isfinite().all(1)
                torch.testing.assert_close(got[:, clean], (x @ finite.t())[:, clean], rtol=0, atol=0)
                assert got[:, ~clean].isnan().all() or format == "fp8_e5m2"


@needs_library
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_small_codes_and_nan_stay_in_their_places(level: int) -> None:
    """float8_e4m3fn of several rows at once: 0, subnormal numbers and NaN change nothing beside them."""
    generator = torch.Generator().manual_seed(level)
    codes = torch.randint(8, 127, (9, 330), generator=generator)
    codes += torch.randint(0, 2, (9, 330), generator=generator) * 128
    codes[1, 70:80], codes[2, 200:208], codes[8, 329], codes[4, :64] = 0, torch.arange(8) + 128, 5, torch.arange(64) % 8
    for broken, nan in ((None, 0), (3, 0x7F), (7, 0xFF)):
        stored = codes.clone()
        if broken is not None:
            stored[broken, 130 if broken == 3 else 329] = nan
        scale = torch.rand(9, 3, generator=generator) + 0.5
        weight = QuantizedWeight(stored.byte().view(torch.float8_e4m3fn), scale, None, "fp8_e4m3fn", (9, 330), 128)
        clean = [row for row in range(9) if row != broken]
        for rows in (1, 2, 3, 4, 6):
            x = torch.randn(rows, 330, generator=generator)
            got = cpu.run(x, weight, None, level)
            expected = native.quantized_matmul(x.double(), weight, None)
            assert relative_rms_error(got[:, clean], expected[:, clean]) <= 1e-6, (rows, broken)
            assert broken is None or got[:, broken].isnan().all()


@needs_library
@pytest.mark.parametrize("format", cpu.FORMATS)
def test_bfloat16_rows_meet_every_code_and_infinities(format: str) -> None:
    """Codes that become bfloat16: subnormal numbers and NaN among them, and x that is infinite or NaN."""
    packed, group = FORMATS[format].packed, 64
    stored = torch.arange(256, dtype=torch.uint8).repeat(2).view(8, 64)
    dtype = {"int8": torch.int8, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(format)
    data, columns = (stored, 128) if packed else (stored.view(dtype), 64)
    weight = QuantizedWeight(data, torch.full((8, columns // group), 0.5), None, format, (8, columns), group)
    numbers = weight.dequantize()
    clean = numbers.isfinite().all(1)
    x = torch.eye(columns, dtype=torch.bfloat16)
    for rows in (1, 4):
        for column in range(0, columns, rows):
            got = cpu.run(x[column : column + rows], weight, None, library.BEST).float()
            expected = numbers.nan_to_num(0.0, 0.0, 0.0)[:, column : column + rows].t()
            torch.testing.assert_close(got[:, clean], expected[:, clean], rtol=2**-8 if format == "nf4" else 0, atol=0)
            assert not got[:, ~clean].isfinite().any()
    infinite = torch.zeros(1, columns, dtype=torch.bfloat16)
    infinite[0, 3] = float("inf")
    one = quantize(torch.randn(5, columns, generator=torch.Generator().manual_seed(0)), format, 64)
    expected = native.quantized_matmul(infinite.double(), one).bfloat16()
    torch.testing.assert_close(cpu.run(infinite, one, None, library.BEST), expected, rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_rows_become_integers_of_enough_bits(dtype: torch.dtype) -> None:
    """Outliers beside small numbers, rows of a range of their own, steps and rows of zeros and of tiny numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(40, 512, generator=generator), "int8", 64)
    x = torch.randn(4, 512, generator=generator)
    x[0, 7] = 3e3
    x[1, :128] *= 2.0**-12
    x[2, 128:] = 0.0
    x[3] = 0.0
    tiny = x * (1.0 if dtype == torch.float16 else 2.0**-110)
    for given in (x.to(dtype), tiny.to(dtype), x[3:].to(dtype)):
        together = cpu.run(given, weight, None, library.BEST)
        for number, row in enumerate(given):  # each by itself: a large row hides a small one
            expected = native.quantized_matmul(row[None].double(), weight)
            for got in (cpu.run(row[None], weight, None, library.BEST), together[number : number + 1]):
                error = relative_rms_error(got, expected)
                assert error <= TOLERANCE[dtype] / 2, f"row {number}: {error}"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_stands_out_beside_quiet_columns(dtype: torch.dtype) -> None:
    """It has the others of its step rounded like itself, which counts where its own weight is 0. A few as large do not
    hide it."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(16, 512, generator=generator)
    numbers[:, 200:204] = 0.0
    for format in ("int8", "int4"):
        weight = quantize(numbers, format, 128)
        for times, end in itertools.product((50.0, 1e2, 1e3, 1e4, 6e4), (201, 204)):
            if end > 201 and times < 1e3:
                continue  # too close to the others: float16 loses a few roundings
            x = torch.randn(3, 512, generator=generator)
            x[1, 200:end] = times
            x[2] = torch.where(torch.arange(512) % 5 == 0, x[2], 0.0)
            x = x.to(dtype)
            expected = native.quantized_matmul(x.double(), weight)
            for got, want in zip(cpu.run(x, weight, None, library.BEST), expected, strict=True):
                assert relative_rms_error(got, want) <= TOLERANCE[dtype], (format, times, end)


@needs_library
def test_layouts_and_no_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(7, 64, generator=generator), "int8")
    columns = torch.empty(64, 7, dtype=torch.int8).t().copy_(weight.data)
    spread = QuantizedWeight(columns, weight.scale.expand(7, 1), None, "int8", (7, 64), 64)
    wide, biases = torch.randn(6, 128, generator=generator), torch.randn(7, 2, generator=generator)
    for x in (wide[:, ::2], wide[:, 3:67], wide[:1, :64].expand(5, 64), wide.t()[:64].t(), wide[:0, :64]):
        for given in (weight, spread):
            expected = native.quantized_matmul(x.double(), given, biases[:, 1].double())
            assert relative_rms_error(cpu.quantized_matmul(x, given, biases[:, 1]), expected) <= 1e-5


@needs_library
def test_the_choice_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    operation, weight = OperationRegistry.create("quantized_matmul"), quantize(torch.ones(32, 64), "int4", 32)
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    assert operation.choose(x, weight).backend == "cpu"
    assert operation.choose(torch.ones(17, 64), weight).backend == "aten"
    assert operation.choose(x.float().requires_grad_(), weight).backend == "aten"
    assert operation.choose(x.double(), weight).backend == "aten"
    assert operation.choose(x[:4], weight.prepacked()).backend == "aten"  # ATen's kernel for it is faster still
    narrow = quantize(torch.ones(32, 64), "int4", 16)
    assert operation.choose(x, narrow).backend == "aten"
    forced = OperationRegistry.create("quantized_matmul", OperationMetadata(backend="cpu"))
    with pytest.raises(UnsupportedOperationError, match="groups of a multiple of 32 columns, got 16"):
        forced(x, narrow)
    with pytest.raises(UnsupportedOperationError, match="got float64"):
        forced(x.double(), weight)
    with pytest.raises(ValueError, match="takes x"):
        operation(x[:, :32], weight)
    # the operator itself, past every check in Python
    data, scale, none = weight.data, weight.scale, torch.empty(0)
    zero = torch.empty(0, dtype=torch.uint8)
    for wrong in (
        (x[:, :32], data, scale, zero, none, 1, 64, 32), (x, data[:, :31], scale, zero, none, 1, 64, 32),
        (x, data, scale[:, :1], zero, none, 1, 64, 32), (x, data, scale, zero, none[None], 1, 64, 32),
        (x, data, scale, zero, torch.ones(5), 1, 64, 32), (x, data, scale, zero, none, 7, 64, 32),
        (x, data, scale, zero, none, 1, 64, 16), (x, data, scale.double(), zero, none, 1, 64, 32),
        (x, data, scale, torch.ones(32, 1, dtype=torch.uint8), none, 1, 64, 32), (x, data, scale, zero, none, 1, 0, 32),
        (x, data, scale, zero, none, 1, 64, 0), (x.double(), data, scale, zero, none, 1, 64, 32),
        (x, data.repeat(1, 2)[:, ::2], scale, zero, none, 1, 64, 32),
        (x, data, scale.mT.contiguous().mT, zero, none, 1, 64, 32),
        (x, data, scale, torch.ones(16, 2, dtype=torch.uint8), none, 1, 64, 32),
        (x, data, scale, torch.ones(32, 2), none, 1, 64, 32), (x, data, scale, zero, torch.ones(64)[::2], 1, 64, 32),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="easytorch: quantized_matmul"):
            torch.ops.easytorch_cpu.quantized_matmul.default(*wrong, library.BEST)


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for format in cpu.FORMATS:
            for given in weights(format, level):
                zero = None if given.zero is None else guarded(given.zero)
                data = guarded(given.data.view(torch.uint8)).view(given.data.dtype)
                weight = QuantizedWeight(data, guarded(given.scale), zero, format, given.shape, given.group_size)
                x, bias = torch.randn(5, given.shape[1], generator=generator), torch.ones(given.shape[0])
                got = cpu.run(guarded(x), weight, guarded(bias), level)
                assert relative_rms_error(got, native.quantized_matmul(x.double(), given, bias.double())) <= 1e-5


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.quantized_matmul.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_library
def test_forward_mode_and_sparse_inputs_are_atens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    generator = torch.Generator().manual_seed(0)
    weight, x = quantize(torch.randn(64, 64, generator=generator), "int8"), torch.randn(2, 64, generator=generator)
    operation = OperationRegistry.create("quantized_matmul")
    assert operation.choose(x, weight).backend == "cpu"
    assert operation.choose(x.to_sparse(), weight).backend == "aten"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(operation(dual, weight)).tangent
    torch.testing.assert_close(tangent, operation(torch.ones_like(x), weight))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedOperationError, match="forward-mode"):
        OperationRegistry.create("quantized_matmul", OperationMetadata(backend="cpu"))(x, weight)
