"""scripts/bench_ops.py: its list, one quick case, and what it writes. Nothing is timed for its figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, expect: int = 0) -> str:
    command = [sys.executable, str(ROOT / "scripts/bench_ops.py"), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == expect, f"{run.stdout}\n{run.stderr}"
    return run.stdout


def test_list_names_cases_of_every_kind() -> None:
    labels = _run("--list").splitlines()
    for start in (
        "attention: prefill causal B1 H16 T1024 D64 bfloat16 forward ",
        "rms_norm T2048 N4096 float32 forward",
        "flash: full B1 H16 T16384 D128 bfloat16 forward+backward",
    ):
        assert any(label.startswith(start) for label in labels), start
    assert len(labels) == len(set(labels))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    only = r"^swiglu T4 N64 float32"
    _run("--device", "cpu", "--only", only, "--quick", "--seconds", "0", "--json", str(folder / "run.json"))
    return folder


def test_json_of_a_quick_case(quick: Path) -> None:
    run = json.loads((quick / "run.json").read_text())
    assert run["versions"]["torch"] == torch.__version__
    assert run["device"] and run["threads"] == 2 and run["copy_gbps"] > 0
    assert [result["passes"] for result in run["results"]] == ["forward", "forward+backward"]
    for result in run["results"]:
        assert (result["operation"], result["shape"], result["dtype"]) == ("swiglu", "T4 N64", "float32")
        assert (result["implementation"], result["backend"], result["tiny"]) == ("swiglu", "aten", True)
        assert result["baseline"] == "F.silu" and result["rounds"] >= 3
        assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
        assert result["torch_ms"] == {"F.silu": result["baseline_ms"]}


def test_earlier_runs_are_reported_as_one(quick: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    earlier, page, picture = quick / "run.json", quick / "page.md", quick / "plot.png"
    slow = json.loads(earlier.read_text())
    for result in slow["results"]:
        result |= {"ratio": 2.0, "ours_ms": 2.0, "baseline_ms": 1.0}
    (quick / "slow.json").write_text(json.dumps(slow))
    sources = [str(earlier), str(quick / "slow.json")]
    page.write_text("before\n<!-- bench_ops: cpu -->\nold\n<!-- bench_ops: end -->\nafter\n")
    reports = ("--device", "cpu", "--markdown", str(page), "--plot", str(picture))
    told = _run("--from", *sources, *reports, "--check", expect=1)
    assert "2 of 2 cases take more than 1.05 of torch's own time and 5 us" in told
    text = page.read_text()
    assert text.count("| swiglu | T4 N64 |") == 2 and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_case_is_an_error() -> None:
    _run("--device", "cpu", "--only", "no such case", expect=2)
