"""llama.cpp's blocks: what they decode to, against the gguf package, and products by every implementation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.quantized_matmul import aten, cpu, native
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.kernels.quantized_matmul.blocks import SCALES, random_blocks

gguf = pytest.importorskip("gguf")
needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")


@pytest.mark.parametrize("format", BLOCKS)
def test_numbers_are_those_of_the_gguf_package(format: str) -> None:
    weight = random_blocks(format, 5, 3 * BLOCKS[format].columns, 0)
    expected = gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[format.upper()])
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    assert weight.shape == expected.shape
    torch.testing.assert_close(weight.dequantize(torch.float64).float(), torch.from_numpy(expected))
    infinite = weight.data.clone()
    start = SCALES[format][0]
    infinite[0, start : start + 2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    rows = QuantizedWeight.of_blocks(infinite, format).dequantize().isfinite().all(1)
    assert rows.tolist() == [False, True, True, True, True]


@needs_library
@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_products_on_every_instruction_set(level: int, format: str) -> None:
    generator = torch.Generator().manual_seed(level)
    for n, blocks in ((1, 1), (7, 2), (4, 3)):
        weight = random_blocks(format, n, blocks * BLOCKS[format].columns, level)
        for rows in (1, 2, 3, 4, 5, 11):
            x, bias = torch.randn(rows, weight.shape[1], generator=generator), torch.randn(n, generator=generator)
            for dtype in cpu.DTYPES:
                expected = native.quantized_matmul(x.to(dtype).double(), weight, bias.double())
                got = cpu.run(x.to(dtype), weight, bias, level)
                # of what such a sum comes to, where its terms happen to cancel
                typical = x.square().mean().sqrt() * weight.dequantize().square().sum(1).mean().sqrt()
                error = relative_rms_error(got, expected)
                error *= min(1.0, float(expected.square().mean().sqrt() / typical))
                # of more rows the weight is rounded to bfloat16, as ATen's path does
                limit = TOLERANCE[dtype] / (1 if rows > 4 and dtype == torch.bfloat16 else 2)
                assert error <= limit, f"{rows} rows of {dtype}, {weight.shape}: {error}"
    # each column alone
    weight = random_blocks(format, 3, BLOCKS[format].columns, level)
    found = cpu.run(torch.eye(weight.shape[1]), weight, None, level)
    torch.testing.assert_close(found.t(), weight.dequantize(), rtol=1e-6, atol=1e-6)


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for format in BLOCKS:
            given = random_blocks(format, 5, 2 * BLOCKS[format].columns, level)
            weight = QuantizedWeight.of_blocks(guarded(given.data), format)
            x = torch.randn(5, given.shape[1], generator=generator)
            got = cpu.run(guarded(x), weight, None, level)
            assert relative_rms_error(got, native.quantized_matmul(x.double(), given)) <= 1e-5


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.quantized_matmul.test_gguf_blocks import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("format", BLOCKS)
def test_the_operation(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients by ATen, the operator under compile, and what is refused."""
    weight = random_blocks(format, 6, BLOCKS[format].columns, 0)
    columns = weight.shape[1]
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).requires_grad_()
    operation = OperationRegistry.create("quantized_matmul")
    expected = native.quantized_matmul(x.double(), weight)
    torch.testing.assert_close(aten.quantized_matmul(x, weight).double(), expected, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(operation(x, weight).sum(), x)
    torch.testing.assert_close(grad, weight.dequantize().sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)
    if library.missing() is None:
        monkeypatch.setattr(processor, "AVX2", True)
        assert operation.choose(x.detach(), weight).backend == "cpu"
    for backend in ("triton", "pallas"):
        assert operation.supports(backend, x, weight) == f"its kernels do not read llama.cpp's blocks, got {format}"
    again = QuantizedWeight.from_dict(weight.to_dict("w."), "w.")
    assert torch.equal(again.dequantize(), weight.dequantize())
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="do not divide"):
        QuantizedWeight(weight.data, one, None, format, (6, columns + 1), columns)
    with pytest.raises(ValueError, match="is stored as"):
        QuantizedWeight(weight.data[:, :-1], one, None, format, (6, columns), columns)
    with pytest.raises(ValueError, match="scale must be"):
        QuantizedWeight(weight.data, torch.ones(6, 1), None, format, (6, columns), columns)
    with pytest.raises(ValueError, match="unknown blocks 'iq1_s'"):
        QuantizedWeight.of_blocks(weight.data, "iq1_s")


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    none, zero = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    for format, number in cpu.BLOCK_FORMATS.items():
        weight = random_blocks(format, 4, BLOCKS[format].columns, 0)
        columns, x = weight.shape[1], torch.ones(2, weight.shape[1])
        for wrong in (
            (x, weight.data[:, :-1], weight.scale, zero, none, number, columns, columns),
            (x, weight.data, torch.ones(4, 1), zero, none, number, columns, columns),
            (x[:, :-1], weight.data, weight.scale, zero, none, number, columns - 1, columns),
        ):
            with pytest.raises(RuntimeError, match="easytorch: quantized_matmul"):
                torch.ops.easytorch_cpu.quantized_matmul.default(*wrong, library.BEST)
