"""The Triton grouped matmul without a GPU: in the interpreter, compiled ahead of time, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.grouped_matmul.triton_op import grouped_matmul, supports
from easytorch.kernels.interop import installed


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    module = "easytorch.kernels.grouped_matmul.triton_calls"
    kernels = compile_ahead(module, "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 4 * 7
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight, sizes = torch.empty(2, 8, 8), torch.tensor([1, 1])
    for dtype, reason in ((torch.float64, "float64"), (torch.bfloat16, "interpreter truncates to bfloat16")):
        x = torch.empty(2, 8, dtype=dtype)
        assert reason in (supports(x) or "")
        with pytest.raises(ValueError, match=reason):
            grouped_matmul(x, weight.to(dtype), sizes)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in (supports(torch.empty(2, 8)) or "")
    assert supports(torch.empty(2, 8, device="meta")) is None


def test_importing_it_loads_no_triton() -> None:
    module = "easytorch.kernels.grouped_matmul.triton_op"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
