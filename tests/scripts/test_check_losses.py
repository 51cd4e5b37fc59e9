"""A sample of `scripts/check_losses.py`: each setting alone, with a head of each way to compute a loss."""

from __future__ import annotations

import pytest

from tests.scripts_loaded import load_script


def test_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("check_losses")
    heads = ["experts", "answers", "classes", "regression"]
    assert script.main(["--heads", *heads, "--pairs", "0"]) == 0, capsys.readouterr().out
    script.of_numbers = lambda losses, given: 2 * losses.mean()  # a formula that is not the documented one
    assert script.main(["--heads", "regression", "--pairs", "0"]) == 1
