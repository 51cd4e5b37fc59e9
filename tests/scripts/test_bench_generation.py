"""scripts/bench_generation.py: one round of a tiny model. Nothing is timed for its figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/bench_generation.py"), "--quick", "--threads", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_one_round(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("before\n<!-- bench_generation -->\nold\n<!-- bench_generation: end -->\nafter\n")
    done = run("--dtypes", "bfloat16", "--json", str(figures), "--markdown", str(page))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(figures.read_text())
    rows = found["rounds"]["bfloat16"]
    assert {"easytorch", "transformers", "machine"} <= set(rows)
    # installed where someone compiled it: then it is measured too, and else named
    assert ("llama.cpp" in rows) != ("llama.cpp is left out" in done.stderr)
    for row, rounds in rows.items():
        assert len(rounds) == 1 and all(seconds > 0 for seconds in rounds[0].values()), row
    assert found["versions"]["torch"] and found["weights"]["read"] > found["weights"]["layers"] > 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    for program in set(rows) - {"machine"}:
        assert f"| bfloat16 | {program} | " in text


def test_programs_of_different_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_generation

    class Answers:
        def __init__(self, *logits: float) -> None:
            self._logits = logits

        def ask(self, request: str, number: int) -> list[float]:
            return list(self._logits)

    workers = {"transformers": Answers(1.0, 2.0), "easytorch": Answers(1.0, 2.01)}
    bench_generation.compare(workers, "bfloat16")
    for logits in ((1.0, 2.5), (float("nan"), 2.0)):
        workers["easytorch"] = Answers(*logits)
        with pytest.raises(SystemExit, match="easytorch bfloat16: its logits differ by"):
            bench_generation.compare(workers, "bfloat16")


def test_a_count_of_zero_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_generation

    monkeypatch.setattr(sys, "argv", ["bench_generation.py", "--rounds", "0"])
    with pytest.raises(SystemExit):
        bench_generation.arguments()
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
