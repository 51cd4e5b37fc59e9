"""A sample of `scripts/check_losses.py`: each setting alone, with a head of each way to compute a loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_losses.py"


def test_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("check_losses", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    heads = ["experts", "answers", "classes", "regression"]
    assert script.main(["--heads", *heads, "--pairs", "0"]) == 0, capsys.readouterr().out
    script.of_numbers = lambda losses, given: 2 * losses.mean()  # a formula that is not the documented one
    assert script.main(["--heads", "regression", "--pairs", "0"]) == 1
