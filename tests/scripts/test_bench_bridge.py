"""scripts/bench_bridge.py: one small turn. Nothing is timed for its figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_turn(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench_bridge.py"), "--only", "bert", "--size", "1MB"]
    command += ["--repeats", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["direction"] for row in rows] == ["torch -> flax", "flax -> torch"]
    for row in rows:
        assert row["bytes"] > 0 and row["over_naive"] is None
        assert abs(row["of_cp"] - row["cp_seconds"] / row["seconds"]) < 1e-9
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
