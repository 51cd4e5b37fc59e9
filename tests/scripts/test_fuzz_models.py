"""scripts/fuzz_models.py: a few drawn configs of every family, and that it sees a difference."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from easytorch.layers.grouped_attention import GroupedAttention
from tests.models.families import DECODERS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fuzz_models.py"

_spec = importlib.util.spec_from_file_location("fuzz_models", SCRIPT)
assert _spec is not None and _spec.loader is not None
fuzz_models = importlib.util.module_from_spec(_spec)
sys.modules["fuzz_models"] = fuzz_models
_spec.loader.exec_module(fuzz_models)


@pytest.mark.parametrize("family", DECODERS)
def test_drawn_configs(family) -> None:
    outcomes = [fuzz_models.run_case(fuzz_models.Case(family, seed)) for seed in range(4)]
    assert not [words for outcome, words in outcomes if outcome == "different"]
    assert any(outcome == "equal" for outcome, _ in outcomes)


@pytest.mark.parametrize("family", fuzz_models.others.OTHERS)
def test_drawn_configs_of_other_families(family) -> None:
    outcomes = [fuzz_models.run_case(fuzz_models.Case(family, seed)) for seed in range(3)]
    assert not [words for outcome, words in outcomes if outcome == "different"]
    assert any(outcome == "equal" for outcome, _ in outcomes)


@pytest.mark.parametrize("check", ["numbers", "cache", "generate", "packed"])
def test_a_wrong_scale_is_seen(check, monkeypatch) -> None:
    made = GroupedAttention.__init__

    def wrong(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.scaling *= 3.0

    monkeypatch.setattr(GroupedAttention, "__init__", wrong)
    outcomes = [fuzz_models.run_case(fuzz_models.Case("llama", seed), check)[0] for seed in range(4)]
    assert "different" in outcomes
