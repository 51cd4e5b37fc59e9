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


def test_a_case_of_many_requests() -> None:
    done = run("--case", "batch", "--requests", "3", "--dtypes", "float32", "--programs", "easytorch", "transformers")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "3 requests, float32: " in done.stdout
    for program in ("engine", "continuous batching"):
        assert f"| {program} | " in done.stdout


def test_cases_compare_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from generation.cases import Found, in_turns
    from generation.requests import WORK

    order: list[str] = []
    asks = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert in_turns(asks, 2, "x") == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["b", "a", "a", "b"]
    table = Found("what", {"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 8.0]}, 10).markdown()
    assert "| a | 2.00 | 5.0 |  |" in table and "| b | 3.00 | 3.3 | 2.00 |" in table
    mixed, shared = (WORK[name](16, small=False) for name in ("batch", "prefix"))
    assert mixed == WORK["server"](16, small=False), "the same work for the engine and the server"
    assert all(32 <= len(one.prompt) <= 512 and 64 <= one.new <= 256 for one in mixed)
    assert len({tuple(one.prompt[:1024]) for one in shared}) == 1 and len({tuple(one.prompt) for one in shared}) == 16
