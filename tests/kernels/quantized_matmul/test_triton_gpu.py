"""The Triton quantized matmul against its definition in float64: outputs and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from easytorch.kernels.quantized_matmul import native
from easytorch.kernels.quantized_matmul.formats import FORMATS
from easytorch.kernels.quantized_matmul.triton_op import quantized_matmul
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
KINDS = [*FORMATS, "int4_zero"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]
Check = Callable[..., None]


def made(kind: str, group_size: int | str | None, shape: tuple[int, int]) -> QuantizedWeight:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8
    made = quantize(weight, kind.removesuffix("_zero"), group_size, symmetric=not kind.endswith("_zero"))
    return made.to(DEVICE)


def check(weight: QuantizedWeight, x: torch.Tensor, dtype: torch.dtype, assert_matches: Check) -> None:
    arguments = {"x": x.to(DEVICE), "bias": torch.randn(weight.shape[0]).to(DEVICE), "weight": weight}
    assert_matches(quantized_matmul, native.quantized_matmul, arguments, dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [None, 16, 32, "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind: str, group: int | str | None, dtype: torch.dtype, assert_matches: Check) -> None:
    check(made(kind, group, (36, 60)), torch.randn(19, 60), dtype, assert_matches)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_columns_and_no_rows(kind: str, assert_matches: Check) -> None:
    check(made(kind, 24, (9, 61)), torch.randn(2, 5, 61), torch.float32, assert_matches)
    assert quantized_matmul(torch.empty(0, 61, device=DEVICE), made(kind, 24, (9, 61))).shape == (0, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_shared_by_several_programs(kind: str, assert_matches: Check) -> None:
    check(made(kind, 64, (36, 256)), torch.randn(1, 256), torch.float16, assert_matches)


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2"])
def test_every_pattern_of_fp8(format: str) -> None:
    data = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FORMATS[format].dtype)[:, None]
    scale = torch.ones(1, 1, device=DEVICE)
    weight = QuantizedWeight(data, scale, None, format, (256, 1), 1)
    got = quantized_matmul(torch.ones(1, 1, device=DEVICE), weight)[0]
    torch.testing.assert_close(got, data.float()[:, 0], rtol=0, atol=0, equal_nan=True)


def test_strides() -> None:
    weight, x = made("int4", 16, (36, 60)), torch.randn(60, 7, device=DEVICE).T
    torch.testing.assert_close(quantized_matmul(x, weight), native.quantized_matmul(x, weight))
    rows = torch.randn(7, 90, device=DEVICE)[:, 20:80]
    torch.testing.assert_close(quantized_matmul(rows, weight), native.quantized_matmul(rows, weight))


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    weight, x = made("int4_zero", 16, (36, 60)), torch.randn(4, 60, device=DEVICE, requires_grad=True)
    compiled = torch.compile(lambda x: 2 * quantized_matmul(x, weight), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, 2 * quantized_matmul(x, weight))
    call = (weight.data, weight.scale, weight.zero, None, None, "int4", 60, 16)
    torch.library.opcheck(torch.ops.easytorch.triton_quantized_matmul.default, (x, None, *call))
    grad = torch.randn(4, 36, device=DEVICE)
    torch.library.opcheck(torch.ops.easytorch.triton_quantized_input_grad.default, (grad, *call))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 63, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_model_shapes(kind: str, rows: int, dtype: torch.dtype, assert_matches: Check) -> None:
    check(made(kind, None, (4096, 2048)), torch.randn(rows, 2048), dtype, assert_matches)
