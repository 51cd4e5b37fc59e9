"""The Triton norms without a GPU: in the interpreter, compiled ahead of time, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.interop import installed
from easytorch.kernels.layer_norm.triton_limits import MAX_WIDTH, supports
from easytorch.kernels.layer_norm.triton_op import layer_norm
from easytorch.kernels.rms_norm.triton_op import rms_norm


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    kernels = compile_ahead(
        "easytorch.kernels.layer_norm.triton_calls", "bfloat16", "sm_80", "sm_90", "sm_100", "gfx942"
    )
    assert len(kernels) == 4 * 12
    # rows stay in registers, but for a little of the backward of the widest, where a thread has 128
    assert [k for k in kernels if k["stack"] > (512 if k["kernel"].endswith("backward_16384") else 0)] == []


@pytest.mark.parametrize(
    ("x", "vectors", "reason"),
    [
        (torch.empty(2, MAX_WIDTH + 1), (), "at most 16384 wide, got 16385"),
        (torch.empty(2, 8, dtype=torch.float64), (), "float64"),
        (torch.empty(2, 8, dtype=torch.bfloat16), (), "interpreter truncates to bfloat16"),
        (torch.empty(2, 8), (torch.empty(8, dtype=torch.float64),), "weights are float32, float16 or bfloat16"),
    ],
)
def test_refuses_with_the_reason(
    x: torch.Tensor, vectors: tuple[torch.Tensor, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    assert reason in (supports(x, *vectors) or "")
    for norm in (layer_norm, rms_norm):
        with pytest.raises(ValueError, match=reason):
            norm(x, *vectors)


def test_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    assert "TRITON_INTERPRET=1" in (supports(torch.empty(2, 8)) or "")
    assert supports(torch.empty(2, 8, device="meta")) is None
    assert supports(torch.empty(2, 8, device="meta"), dtype=torch.float64) is not None
    monkeypatch.setitem(installed.INSTALLED, "triton", False)
    assert "pip install" in (supports(torch.empty(2, 8)) or "")


def test_importing_them_loads_no_triton() -> None:
    modules = "easytorch.kernels.layer_norm.triton_op, easytorch.kernels.rms_norm.triton_op"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
