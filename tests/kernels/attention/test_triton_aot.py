"""The Triton kernels compile for GPUs that are not here, within what those have (scripts/aot_report.py does all cases).

In a process of its own, without TRITON_INTERPRET: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easytorch.kernels.interop.triton_devices import SHARED_MEMORY

pytest.importorskip("triton", reason="Triton is not installed: pip install easytorch[gpu]")

ROOT = Path(__file__).parents[3]
# bytes of a thread: what a kernel keeps outside its inner loops; a loop that spilled would need thousands
STACK = 512


def test_causal_compiles_within_the_limits(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    architectures = ("sm_80", "sm_90", "sm_100", "gfx942")
    kernels = compile_ahead("easytorch.kernels.attention.triton_aot", "bfloat16", *architectures)
    names = ["forward", "delta", "key_value_grad", "query_grad"]
    assert [kernel["kernel"] for kernel in kernels] == names * len(architectures)
    assert [kernel for kernel in kernels if kernel["stack"] > STACK] == []
    # the accumulators alone need more: these figures are of the kernels, not of stubs
    assert all(kernel["registers"] >= 64 for kernel in kernels if kernel["kernel"] != "delta")


# the least shared memory; the compiler of the other vendor. The interpreter accepts code that neither would.
@pytest.mark.parametrize(("architecture", "head_dim", "registers"), [("sm_86", 128, 255), ("gfx942", 64, 512)])
def test_every_feature_compiles_within_the_limits(architecture: str, head_dim: int, registers: int) -> None:
    module = "easytorch.kernels.attention.triton_aot"
    options = ("--everything", "--kernels", "forward", "key_value_grad", "query_grad")
    command = [sys.executable, "-W", "ignore", "-m", module, architecture, "bfloat16", str(head_dim), *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) == 3
    for kernel in kernels:
        assert (kernel["architecture"], kernel["head_dim"]) == (architecture, head_dim)
        # an emptied kernel takes a handful
        assert 64 <= kernel["registers"] <= registers, kernel
        assert 0 < kernel["shared"] <= SHARED_MEMORY[architecture], kernel


def test_an_unknown_architecture_is_refused() -> None:
    command = [sys.executable, "-m", "easytorch.kernels.attention.triton_aot", "sm_70", "float16", "64"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 2
    assert "sm_80" in run.stderr
