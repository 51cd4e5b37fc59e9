"""`scripts/check_as_transformers.py` on a checkout's tests of a family."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import transformers

import tests
from tests.scripts_loaded import load_script

SUITE = """
import unittest
from transformers import GPT2Model

class GPT2ModelTest(unittest.TestCase):
    def test_of_both(self):
        self.fail("as transformers' own")

    def test_of_ours(self):
        assert GPT2Model.__module__.startswith("transformers.")

    def test_passes(self):
        assert issubclass(GPT2Model, __import__("transformers").PreTrainedModel)
"""


def test_a_failure_counts_where_transformers_class_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "gpt2"
    folder.mkdir(parents=True)
    (folder / "test_modeling_gpt2.py").write_text(SUITE)
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path), "gpt2"])
    monkeypatch.setattr(tests, "__path__", list(tests.__path__))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    before = set(sys.modules)
    try:
        status = load_script("check_as_transformers").main()
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("native_tests", "stock_tests"):
                del sys.modules[name]
    said = capsys.readouterr().out
    assert status == 1 and said.count("FAILED") == 1 and "FAILED gpt2 GPT2ModelTest.test_of_ours" in said
    assert "{'passed': 1, 'skipped': 0, 'both': 1, 'ours': 1}" in said
    assert transformers.GPT2Model.__module__.startswith("transformers.")
