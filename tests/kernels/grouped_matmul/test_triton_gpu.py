"""The Triton grouped matmul against its definition in float64: outputs and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.grouped_matmul import native
from easytorch.kernels.grouped_matmul.triton_op import grouped_matmul

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
SIZES = {
    "uneven, one empty, rows left over": (63, [7, 0, 30, 1, 20]),
    "several tiles of rows": (150, [17, 70, 0, 60]),
    "none": (20, [0, 0]),
    "no rows": (0, [0, 0]),
    "one row each": (4, [1, 1, 1, 1]),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]
Check = Callable[..., None]


def operands(
    rows: int, experts: int, depth: int = 60, width: int = 36, *, transposed: bool = False
) -> dict[str, torch.Tensor]:
    shapes = {
        "x": (rows, depth),
        "weight": (experts, width, depth) if transposed else (experts, depth, width),
        "bias": (experts, width),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_outputs_and_gradients(
    case: tuple[int, list[int]], transposed: bool, dtype: torch.dtype, assert_matches: Check
) -> None:
    rows, sizes = case
    arguments: dict[str, Any] = operands(rows, len(sizes), transposed=transposed)
    arguments.update(group_sizes=torch.tensor(sizes, device=DEVICE), transposed=transposed)
    assert_matches(grouped_matmul, native.grouped_matmul, arguments, dtype)


def test_more_tiles_than_programs_and_a_band_of_rows(assert_matches: Check) -> None:
    arguments: dict[str, Any] = operands(300, 3, 20, 70)
    arguments["group_sizes"] = torch.tensor([250, 3, 40], device=DEVICE, dtype=torch.int32)
    assert_matches(grouped_matmul, native.grouped_matmul, arguments, torch.float32)


def test_rows_of_no_group_may_hold_anything_and_any_stride() -> None:
    given = operands(9, 2)
    x = given["x"].T.contiguous().T
    x[5:] = float("nan")
    x.requires_grad_()
    weight = given["weight"].requires_grad_()
    output = grouped_matmul(x, weight, torch.tensor([2, 3], device=DEVICE))
    assert torch.equal(output[5:], torch.zeros_like(output[5:]))
    grads = torch.autograd.grad(output.sum(), (x, weight))
    assert all(grad.isfinite().all() for grad in grads)
    torch.testing.assert_close(output, native.grouped_matmul(x, weight, torch.tensor([2, 3], device=DEVICE)))


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    given = {name: tensor.requires_grad_() for name, tensor in operands(8, 2).items()}
    sizes = torch.tensor([3, 4], device=DEVICE)

    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return 2 * grouped_matmul(x, weight, sizes, bias)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**given, sizes=sizes)
    torch.testing.assert_close(compiled, step(**given, sizes=sizes))
    call = (given["x"], given["weight"], sizes, given["bias"], False)
    torch.library.opcheck(torch.ops.easytorch.triton_grouped_matmul.default, call)
    torch.library.opcheck(torch.ops.easytorch.triton_grouped_weight_grad.default, (call[0], call[0], sizes))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [64, 512, 4096])
def test_model_shapes(rows: int, dtype: torch.dtype, assert_matches: Check) -> None:
    arguments: dict[str, Any] = operands(rows, 8, 1024, 1408)
    chosen = torch.randint(0, 8, (rows - 3,), generator=torch.Generator().manual_seed(1))
    arguments["group_sizes"] = torch.bincount(chosen, minlength=8).to(DEVICE)
    assert_matches(grouped_matmul, native.grouped_matmul, arguments, dtype)
