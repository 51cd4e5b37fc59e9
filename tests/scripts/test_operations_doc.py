"""docs/operations.md is what scripts/operations_doc.py writes, and says what is known of some operations."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations.md"


@pytest.mark.skipif(not (find_spec("jax") and find_spec("triton")), reason="the page asks kernels of jax and triton")
def test_the_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts/operations_doc.py"), "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


def _cells(operation: str, feature: str) -> list[str]:
    section = PAGE.read_text().split(f"\n### {operation}", 1)[1].split("\n#", 1)[0]
    row = re.search(rf"^\| {re.escape(feature)} \| (.*) \|$", section, re.MULTILINE)
    assert row is not None, (operation, feature)
    return row[1].split(" | ")


def test_the_page_says_what_is_known() -> None:
    assert _cells("sdpa", "softcap") == ["yes", "no (1)", "no (1)"]
    assert set(_cells("flash", "sinks")) == {"yes"}
    assert set(_cells("vanilla", "float64")) == {"yes"}
    assert "\n1. ATen has no softcap\n" in PAGE.read_text()
