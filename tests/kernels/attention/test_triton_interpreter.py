"""Runs the cases of test_triton_gpu.py on the CPU, by Triton's interpreter.

In a process of its own: Triton decides when it is imported whether its functions are compiled or interpreted, and the
other tests of the same process (pytest-xdist mixes them) need them compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install easytorch[gpu]")


def numbers(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


pytestmark = pytest.mark.skipif(
    numbers("triton") < (3, 7) and numbers("numpy") >= (2, 4),
    reason="the interpreter of Triton before 3.7 takes int() of an array, which numpy 2.4 refuses",
)
CASES = Path(__file__).with_name("test_triton_gpu.py")
ROOT = Path(__file__).parents[3]


# two halves, so that pytest-xdist can run them side by side
@pytest.mark.parametrize("half", ["test_float32", "not test_float32"])
def test_cases_of_the_gpu(half: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", half, str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout
