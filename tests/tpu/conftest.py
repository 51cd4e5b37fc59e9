"""The real TPU compiler, on a host without a TPU, for the programs that a test file lists in its `programs()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, dict[str, int]]:
    """Name of each program -> its kernels, bytes of temporary memory, sends and gathers."""
    if find_spec("libtpu") is None or find_spec("jax") is None:
        pytest.skip("needs jax and libtpu: pip install 'easytorch[tpu]'")
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_programs.py")), str(request.path)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout.splitlines()[-1])
