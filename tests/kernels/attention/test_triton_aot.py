"""The Triton kernels compile for GPUs that are not here, within what those have (scripts/aot_report.py does all cases).

In a process of its own, without TRITON_INTERPRET: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easytorch.kernels.interop.triton_devices import SHARED_MEMORY

pytest.importorskip("triton", reason="Triton is not installed: pip install easytorch[gpu]")

ROOT = Path(__file__).parents[3]
# a thread's registers: 255 on NVIDIA, 512 vector and accumulation registers on CDNA
REGISTERS = {"gfx942": 512}
# bytes of a thread: what a kernel keeps outside its inner loops; a loop that spilled would need thousands
STACK = 512


def compiled(architecture: str, dtype: str, head_dim: int, *options: str) -> list[dict[str, Any]]:
    module = "easytorch.kernels.attention.triton_aot"
    command = [sys.executable, "-W", "ignore", "-m", module, architecture, dtype, str(head_dim), *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_within_the_limits(kernel: dict[str, Any]) -> None:
    architecture = kernel["architecture"]
    # a kernel that was emptied because it cannot run takes a handful
    assert 16 <= kernel["registers"] <= REGISTERS.get(architecture, 255), kernel
    assert 0 < kernel["shared"] <= SHARED_MEMORY[architecture], kernel
    assert kernel["tensor_memory"] <= 512, kernel


@pytest.mark.parametrize(
    ("architecture", "dtype", "head_dim"),
    [("sm_80", "float16", 64), ("sm_90", "bfloat16", 128), ("sm_100", "bfloat16", 64), ("gfx942", "float16", 128)],
)
def test_causal_compiles_within_the_limits(architecture: str, dtype: str, head_dim: int) -> None:
    kernels = compiled(architecture, dtype, head_dim)
    assert [kernel["kernel"] for kernel in kernels] == ["forward", "delta", "key_value_grad", "query_grad"]
    for kernel in kernels:
        assert (kernel["architecture"], kernel["dtype"], kernel["head_dim"]) == (architecture, dtype, head_dim)
        assert_within_the_limits(kernel)
        assert kernel["stack"] <= STACK, kernel
    # the accumulators alone need more: these figures are of the kernels, not of stubs
    assert all(kernel["registers"] >= 64 for kernel in kernels if kernel["kernel"] != "delta")


# the least shared memory; the compiler of the other vendor. The interpreter accepts code that neither would.
@pytest.mark.parametrize(("architecture", "head_dim"), [("sm_86", 128), ("gfx942", 64)])
def test_every_feature_compiles_within_the_limits(architecture: str, head_dim: int) -> None:
    kernels = compiled(
        architecture, "bfloat16", head_dim, "--everything", "--kernels", "forward", "key_value_grad", "query_grad"
    )
    assert len(kernels) == 3
    for kernel in kernels:
        assert_within_the_limits(kernel)


def test_an_unknown_architecture_is_refused() -> None:
    command = [sys.executable, "-m", "easytorch.kernels.attention.triton_aot", "sm_70", "float16", "64"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "sm_80" in run.stderr
