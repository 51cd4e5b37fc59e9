"""examples/: every file runs by itself, and is listed in its README."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# One after the other in one process: importing torch takes longer than they do.
RUN = """
import runpy, sys
for path in sys.argv[1:]:
    print("ran", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


def test_they_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, EXAMPLES)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran ") == len(EXAMPLES) == 7
    assert list(tmp_path.iterdir()) == []  # they clean up


def test_each_is_described():
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"[{path.name}]({path.name})" not in page] == []
