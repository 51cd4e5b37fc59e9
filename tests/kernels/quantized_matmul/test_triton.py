"""The Triton quantized matmul without a GPU: in the interpreter, compiled ahead of time, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.interop import installed
from easytorch.kernels.quantized_matmul.triton_op import quantized_matmul, supports
from easytorch.kernels.quantized_matmul.triton_tuning import splits_of, tiles_of
from easytorch.kernels.quantized_matmul.weight import quantize


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    module = "easytorch.kernels.quantized_matmul.triton_calls"
    kernels = compile_ahead(module, "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 4 * 11
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_one_token_fills_the_device() -> None:
    tiles = tiles_of("forward", "sm_90", torch.bfloat16, 1, 128)
    assert splits_of(tiles, 1, 4096, 4096, 132) == 5
    assert splits_of(tiles, 1, 128256, 4096, 132) == 1
    assert splits_of(tiles, 1, 64, 64, 132) == 1
    assert splits_of(tiles_of("forward", "sm_90", torch.bfloat16, 512, 128), 512, 4096, 4096, 132) == 1


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight = quantize(torch.ones(4, 8), "int8")
    for dtype, reason in ((torch.float64, "float64"), (torch.bfloat16, "interpreter truncates to bfloat16")):
        x = torch.empty(2, 8, dtype=dtype)
        assert reason in (supports(x) or "")
        with pytest.raises(ValueError, match=reason):
            quantized_matmul(x, weight)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in (supports(torch.empty(2, 8)) or "")
    assert supports(torch.empty(2, 8, device="meta")) is None


def test_importing_it_loads_no_triton() -> None:
    module = "easytorch.kernels.quantized_matmul.triton_op"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
