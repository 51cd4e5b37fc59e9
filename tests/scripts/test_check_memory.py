"""scripts/check_memory.py: some calls of each kind. A million of them take it a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from easytorch.kernels.cpu import library

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
def test_the_process_does_not_grow() -> None:
    command = [sys.executable, str(ROOT / "scripts/check_memory.py"), "--calls", "18000", "--steps", "2000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "linear, refused" in run.stdout
