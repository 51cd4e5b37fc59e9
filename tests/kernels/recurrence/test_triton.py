"""The Triton kernels with a state without a GPU: in the interpreter, compiled ahead of time, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easytorch.operations import OperationMetadata, OperationRegistry

OPERATIONS = ["causal_conv1d", "ssm1", "ssm2", "gated_delta_rule"]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_ahead_of_time(name: str, compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    kernels = compile_ahead(f"easytorch.kernels.{name}.triton_calls", "bfloat16", *ARCHITECTURES)
    # the state of the delta rule and its keys, both 128 high, leave a little too few registers
    allowed = 256 if name == "gated_delta_rule" else 0
    assert [kernel for kernel in kernels if kernel["stack"] > allowed] == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_refuses_float64_with_the_reason(name: str) -> None:
    args, kwargs = OperationRegistry.get(name).typical_call()
    wide = tuple(x.double() for x in args)
    choice = OperationRegistry.create(name).choose_on("cuda", wide, kwargs)
    assert choice.backend == "native" and ("float64" in choice.reason or "not installed" in choice.reason)
    forced = OperationRegistry.create(name, OperationMetadata(backend="triton"))
    with pytest.raises(ValueError, match=r"float64|not installed"):
        forced.choose_on("cuda", wide, kwargs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_importing_them_loads_no_triton(name: str) -> None:
    program = f"import sys, easytorch.kernels.{name}.triton_op; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
