"""Triton cross entropy without a GPU: in the interpreter, compiled ahead of time, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.cross_entropy.triton_op import cross_entropy


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    module = "easytorch.kernels.cross_entropy.triton_calls"
    kernels = compile_ahead(module, "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942")
    assert len(kernels) == 4 * 4
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    labels = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"triton cross_entropy: .*(float64|not installed)"):
        cross_entropy(torch.empty(2, 8, dtype=torch.float64), labels)
    with pytest.raises(ValueError, match="labels"):
        cross_entropy(torch.empty(2, 8), labels[:1])


def test_importing_it_loads_no_triton() -> None:
    modules = "easytorch.kernels.cross_entropy.triton_op, easytorch.kernels.cross_entropy.fused_linear"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
