"""Codes of 16 rows side by side: the layout, its inverse, products on every instruction set, and what else reads it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.quantized_matmul import aten, cpu, cpu_layout, interleaved, native
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.kernels.quantized_matmul.blocks import random_blocks

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
FORMATS = ("int8", "int4", "fp4_e2m1", "q8_0", "q4_0", "q4_k", "q6_k")


def weights(format: str, seed: int) -> Iterator[QuantizedWeight]:
    """Of one scale a row and of groups, with a shorter last one and more than 16 of them; with zeros; of blocks."""
    if format in BLOCKS:
        yield random_blocks(format, 32, 3 * BLOCKS[format].columns, seed)
        return
    draw = torch.Generator().manual_seed(seed)
    for rows, columns, group_size in ((16, 96, "row"), (32, 32, "tensor"), (16, 608, 32), (32, 416, 128)):
        numbers = torch.randn(rows, columns, generator=draw)
        yield quantize(numbers, format, group_size)
        if format == "int4":
            yield quantize(numbers + 0.3, format, group_size, symmetric=False)


def laid_out(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, data=interleaved.interleave(weight.data, weight.format))


@pytest.mark.parametrize("format", FORMATS)
def test_the_layout_and_its_inverse(format: str) -> None:
    for weight in weights(format, 0):
        made = laid_out(weight)
        assert made.interleaved and not weight.interleaved and made.shape == weight.shape
        assert made.data.shape == (weight.shape[0] // 16, 16 * weight.data.shape[1])
        assert torch.equal(interleaved.separate(made.data, format), weight.data)
        assert torch.equal(made.separated().data, weight.data) and weight.separated() is weight
        assert torch.equal(made.dequantize(), weight.dequantize())
        assert made.to_dict().keys() == weight.to_dict().keys()
        assert torch.equal(made.to_dict()["data"], weight.data)


def test_where_bytes_stand() -> None:
    """Of row 5 of the second 16: the scales and codes of a pair of blocks, and of one that has no second."""
    rows = torch.arange(32 * 3 * 18).view(32, 54).remainder(251).to(torch.uint8)
    second, row = interleaved.interleave(rows, "q4_0")[1], rows[21]
    for block, at in ((0, 0), (1, 32), (2, 2 * 16 * 18)):
        assert torch.equal(second[at + 5 * 2 : at + 5 * 2 + 2], row[18 * block : 18 * block + 2])
    for block, line, at in ((0, 0, 64), (0, 3, 64 + 3 * 64), (1, 2, 64 + 6 * 64), (2, 1, 2 * 16 * 18 + 32 + 64)):
        of_row = 18 * block + 2 + 4 * line
        assert torch.equal(second[at + 5 * 4 : at + 5 * 4 + 4], row[of_row : of_row + 4])


@needs_library
@pytest.mark.parametrize("format", FORMATS)
def test_the_library_lays_out_the_same(format: str) -> None:
    for weight in weights(format, 1):
        expected = interleaved.interleave(weight.data, format)
        one = weight.scale.shape[1] == 1
        found = cpu_layout.interleave(weight.data, format, weight.shape[1], 32 if one else weight.group_size)
        # None where this CPU has no dot products of bytes
        assert found is None or torch.equal(found, expected)
        assert (found is not None) or not processor.BYTE_DOT_PRODUCTS
        assert torch.equal(cpu_layout.separate(expected, format, weight.shape[1]), weight.data)


@needs_library
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_products_on_every_instruction_set(level: int, format: str) -> None:
    generator = torch.Generator().manual_seed(level)
    for weight in weights(format, level):
        n, k = weight.shape
        made = laid_out(weight)
        for rows in (1, 2, 3, 4, 7, 16, 17):
            x, bias = torch.randn(rows, k, generator=generator), torch.randn(n, generator=generator)
            for dtype in cpu.DTYPES:
                given, added = x.to(dtype), bias if rows % 2 else None
                expected = native.quantized_matmul(given.double(), weight, None if added is None else added.double())
                error = relative_rms_error(cpu.run(given, made, added, level), expected)
                # where the weight is decoded it is rounded to bfloat16
                limit = TOLERANCE[dtype] / (1 if rows > 4 and dtype == torch.bfloat16 else 2)
                assert error <= limit, f"{rows} rows of {dtype}, {weight.shape}: {error}"
    # each column alone
    found = cpu.run(torch.eye(k), made, None, level)
    torch.testing.assert_close(found.t(), weight.dequantize(), rtol=1e-6, atol=1e-6)


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_numbers_that_stand_out(dtype: torch.dtype) -> None:
    """Beside small numbers, which count where the weight of one or a few large ones is 0: in two bytes, in three and in
    float32; rows of zeros, of tiny numbers and with infinities."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(32, 512, generator=generator)
    numbers[:, 200:204] = 0.0
    for format in ("int8", "int4", "fp4_e2m1"):
        for weight in (quantize(numbers, format, 128), quantize(numbers, format, "row")):
            made = laid_out(weight)
            for times, end in itertools.product((50.0, 1e3, 6e4, 1e7), (201, 204)):
                x = torch.randn(4, 512, generator=generator)
                x[1, 200:end] = min(times, 6e4 if dtype == torch.float16 else times)
                x[2] = torch.where(torch.arange(512) % 5 == 0, x[2], 0.0) * (
                    1.0 if dtype == torch.float16 else 2.0**-110
                )
                x[3] = 0.0
                x = x.to(dtype)
                expected = native.quantized_matmul(x.double(), weight)
                for got, want in zip(cpu.run(x, made, None, library.BEST), expected, strict=True):
                    assert relative_rms_error(got, want) <= TOLERANCE[dtype], (format, times, end)
    infinite = torch.zeros(2, 512, dtype=dtype)
    infinite[0, 3], infinite[1, 4] = float("inf"), float("nan")
    expected = native.quantized_matmul(infinite.double(), weight).to(dtype)
    torch.testing.assert_close(cpu.run(infinite, made, None, library.BEST), expected, rtol=0, atol=0, equal_nan=True)


@needs_library
def test_more_rows_than_the_cache_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = quantize(torch.randn(32, 608, generator=generator), "int8"), torch.randn(801, 608, generator=generator)
    for dtype in cpu.DTYPES:
        expected = native.quantized_matmul(x.to(dtype).double(), weight)
        found = cpu.run(x.to(dtype), laid_out(weight), None, library.BEST)
        assert relative_rms_error(found, expected) <= TOLERANCE[dtype] / 2


@needs_library
def test_a_zero_point_cancels_beside_a_number_that_stands_out() -> None:
    numbers = torch.rand(16, 128, generator=torch.Generator().manual_seed(0)) + 0.5
    numbers[:, 7] = 0.0
    weight = quantize(numbers, "int4", 128, symmetric=False)
    for dtype in cpu.DTYPES:
        x = torch.ones(1, 128)
        x[0, 7] = 300.0
        expected = native.quantized_matmul(x.to(dtype).double(), weight)
        found = cpu.run(x.to(dtype), laid_out(weight), None, library.BEST)
        assert relative_rms_error(found, expected) <= TOLERANCE[dtype] / 2


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_reads_a_weight_takes_both(format: str) -> None:
    """ATen's path in blocks of rows, gradients, the operators, compile, and the operation's choice."""
    for weight in weights(format, 2):
        made = laid_out(weight)
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).requires_grad_()
        operation = OperationRegistry.create("quantized_matmul")
        assert torch.equal(aten.quantized_matmul(x, made), aten.quantized_matmul(x, weight))
        (grad,) = torch.autograd.grad(operation(x, made).square().sum(), x)
        (expected,) = torch.autograd.grad(operation(x, weight).square().sum(), x)
        assert torch.equal(grad, expected)
        again = QuantizedWeight.from_dict(made.to_dict("w."), "w.")
        assert torch.equal(again.data, weight.data)
        prepacked = made.prepacked()
        assert prepacked.packed is None or not prepacked.interleaved
    compiled = torch.compile(lambda x: operation(x, made), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), operation(x, weight))
    wide = native.quantized_matmul(torch.ones(200, weight.shape[1]), weight)
    torch.testing.assert_close(
        aten.quantized_matmul(torch.ones(200, weight.shape[1]), made), wide, rtol=1e-4, atol=1e-4
    )


def test_other_shapes_are_no_layout() -> None:
    weight = quantize(torch.ones(32, 64), "int8", 32)
    with pytest.raises(ValueError, match="is stored as"):
        replace(weight, data=weight.data.reshape(1, -1))
    ten = quantize(torch.ones(10, 64), "int8", 32)
    assert cpu_layout.interleave(ten.data, "int8", 64, 32) is None
    assert cpu_layout.interleave(quantize(torch.ones(16, 33), "int8").data, "int8", 33, 32) is None
    assert cpu_layout.interleave(quantize(torch.ones(16, 64), "int8", 16).data, "int8", 64, 16) is None
    assert cpu_layout.interleave(quantize(torch.ones(16, 64), "nf4", 64).data, "nf4", 64, 64) is None
    if library.missing() is not None:
        return
    x, scale, none, zero = torch.ones(2, 64), torch.ones(1, 1), torch.empty(0), torch.empty(0, dtype=torch.uint8)
    data = laid_out(quantize(torch.ones(32, 64), "int8")).data
    for wrong in (data[:, :-1], data.repeat(1, 2)[:, : data.shape[1]], data.reshape(4, -1)):
        with pytest.raises(RuntimeError, match="easytorch: quantized_matmul"):
            torch.ops.easytorch_cpu.quantized_matmul.default(x, wrong, scale, zero, none, 0, 64, 64, library.BEST)
    for given in (
        (data, 0, 64, 32, False),
        (data[:, ::2], 0, 64, 32, True),
        (data, 0, 0, 32, True),
        (data, 99, 64, 32, True),
    ):
        with pytest.raises(RuntimeError, match="easytorch: interleave_codes"):
            torch.ops.easytorch_cpu.interleave_codes.default(*given, library.BEST)


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for format in FORMATS:
            for given in weights(format, level):
                made = laid_out(given)
                zero = None if made.zero is None else guarded(made.zero)
                data = guarded(made.data.view(torch.uint8)).view(made.data.dtype)
                weight = replace(made, data=data, scale=guarded(made.scale), zero=zero)
                for rows in (1, 5):
                    x, bias = torch.randn(rows, given.shape[1], generator=generator), torch.ones(given.shape[0])
                    got = cpu.run(guarded(x), weight, guarded(bias), level)
                    assert relative_rms_error(got, native.quantized_matmul(x.double(), given, bias.double())) <= 1e-5
                separated = cpu_layout.separate(guarded(made.data.view(torch.uint8)), format, given.shape[1])
                assert torch.equal(separated, given.data.view(torch.uint8))
                cpu_layout.interleave(guarded(given.data.view(torch.uint8)), format, given.shape[1], 32)


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.quantized_matmul.test_cpu_interleaved import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_library
def test_many_rows_of_bfloat16_are_left_to_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    weight = laid_out(quantize(torch.randn(16, 64), "int8"))
    for amx, dtype, rows, preferred in (
        (True, torch.bfloat16, 64, True),
        (True, torch.bfloat16, 65, False),
        (True, torch.float32, 2048, True),
        (False, torch.bfloat16, 2048, True),
        (False, torch.bfloat16, 2049, False),
    ):
        monkeypatch.setattr(processor, "AMX_PRODUCTS", amx)
        assert cpu.prefers(torch.empty(rows, 64, dtype=dtype), weight) is preferred
