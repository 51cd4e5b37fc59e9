"""The Triton rotary without a GPU: in the interpreter, compiled ahead of time, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.rotary import triton_op


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    module = "easytorch.kernels.rotary.triton_calls"
    kernels = compile_ahead(module, "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 4 * 6
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, table = torch.empty(1, 5, 2, 8, dtype=torch.float64), torch.empty(1, 5, 8)
    for reason, arguments in {
        "(float64|not installed)": (q, q, table, table),
        "its tables are float32, float16 or bfloat16": (q, q, table.double(), table.double()),
        "gradients of the tables": (q, q, table.clone().requires_grad_(), table),
    }.items():
        with pytest.raises(ValueError, match=f"triton rotary: .*{reason}"):
            triton_op.rotary(*arguments)


def test_importing_it_loads_no_triton() -> None:
    program = "import sys, easytorch.kernels.rotary.triton_op; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
