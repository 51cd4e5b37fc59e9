"""scripts/bench_models.py: both libraries' calls of a case compute the same."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import easytorch
from tests.scripts_loaded import load_script

bench_models = load_script("bench_models")


def test_both_libraries_encode_the_same_sentences() -> None:
    case = bench_models.CASES["minilm-1000"]
    ours, theirs = (case.make(source, case, 1, 5)() for source in (easytorch, transformers))
    assert ours.shape == (5, 384)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_figures_and_plot(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    seconds = {"easytorch": 1.0, "transformers": 4.0}
    monkeypatch.setattr(bench_models, "alone", lambda library, *_: {"seconds": seconds[library], "mib": 10.0})
    written, drawn = tmp_path / "figures.json", tmp_path / "models.png"
    monkeypatch.setattr("sys.argv", ["bench_models", "moe-decode", "--json", str(written), "--plot", str(drawn)])
    assert bench_models.main() == 0
    case = json.loads(written.read_text())["cases"]["moe-decode"]
    assert case["ratio"]["seconds"] == 0.25 and case["bar"] == 0.5
    assert drawn.stat().st_size > 1000 and "time 0.25 (bar 0.5)" in capsys.readouterr().out
