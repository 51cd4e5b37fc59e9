"""The Triton decode kernels without a GPU: in the interpreter, compiled ahead of time, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.decode.triton_op import decode, supports
from easytorch.kernels.interop import installed


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


@pytest.mark.parametrize(
    ("dtype", "architectures"),
    [("bfloat16", ("sm_80", "sm_90", "sm_100", "gfx942")), ("float32", ("sm_86",))],
)
def test_compiles_ahead_of_time(
    dtype: str, architectures: tuple[str, ...], compile_ahead: Callable[..., list[dict[str, Any]]]
) -> None:
    kernels = compile_ahead("easytorch.kernels.decode.triton_calls", dtype, *architectures)
    assert len(kernels) == 6 * len(architectures)
    # a few registers outside the loop; a loop that spilled would need thousands of bytes
    assert [kernel for kernel in kernels if kernel["stack"] > 128] == []


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(installed.INSTALLED, "triton", True)
    query, cache = torch.empty(1, 1, 2, 8), torch.empty(1, 3, 2, 8)
    assert supports(query, cache, cache, {}) is None
    wide = torch.empty(1, 1, 2, 300)
    for given, features, reason in (
        ((query, cache, cache), {"dropout_prob": 0.1}, "dropout"),
        ((query, cache.clone().requires_grad_(), cache), {}, "no gradients"),
        ((query, cache, cache), {"sinks": torch.empty(2, requires_grad=True)}, "no gradients"),
        ((wide, wide, wide), {}, "1..256, got 300"),
        ((query.double(), cache.double(), cache.double()), {}, "float64"),
    ):
        assert reason in (supports(*given, features) or "")
        with pytest.raises(NotImplementedError, match=reason):
            decode(*given, **features)
        with torch.no_grad():
            assert supports(query, cache.clone().requires_grad_(), cache, {}) is None


def test_importing_it_loads_no_triton() -> None:
    module = "easytorch.kernels.decode.triton_op"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
