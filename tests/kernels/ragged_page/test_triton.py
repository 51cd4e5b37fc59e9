"""The Triton kernels over pages without a GPU: in the interpreter, compiled ahead of time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easytorch.kernels.ragged_page.triton_tuning import MAX_SPLITS, splits_of

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


@pytest.mark.parametrize("module", ["triton_calls", "triton_write_calls"])
def test_compiles_ahead_of_time(module: str, compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    kernels = compile_ahead(f"easytorch.kernels.ragged_page.{module}", "bfloat16", *ARCHITECTURES)
    assert len(kernels) == len(ARCHITECTURES) * (5 if module == "triton_calls" else 2)
    assert [kernel for kernel in kernels if kernel["stack"]] == []


def test_splits() -> None:
    assert splits_of(8, 100_000, 132) == 64 == MAX_SPLITS
    assert splits_of(512, 100_000, 132) == 1
    assert splits_of(64, 4096, 132) == 8  # 264 programs are wanted, and 512 keys for each
    assert splits_of(1, 1000, 132) == 1


def test_importing_them_loads_no_triton() -> None:
    modules = "easytorch.kernels.ragged_page.triton_op, easytorch.kernels.ragged_page.write"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; assert 'triton' not in sys.modules"], check=True, timeout=600
    )
