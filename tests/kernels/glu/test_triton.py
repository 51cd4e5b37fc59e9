"""The Triton gated linear units without a GPU: in the interpreter, compiled ahead of time, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.glu import triton_op


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    kernels = compile_ahead("easytorch.kernels.glu.triton_calls", "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 4 * 6
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.empty(2, 8, dtype=torch.float64)
    for unit in (triton_op.swiglu, triton_op.geglu):
        with pytest.raises(ValueError, match=r"triton gated linear unit: .*(float64|not installed)"):
            unit(x, x)
        with pytest.raises(ValueError, match="one shape and dtype"):
            unit(x, x[:1])


def test_importing_them_loads_no_triton() -> None:
    program = "import sys, easytorch.kernels.glu.triton_op; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
