"""scripts/check_models.py: what is quick for every family, compiling and exporting for one each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.models.families import FAMILIES

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_models.py"
SLOW = {"compile": "gemma3_text", "export": "phi3"}

_spec = importlib.util.spec_from_file_location("check_models", SCRIPT)
assert _spec is not None and _spec.loader is not None
check_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_models)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", sorted(set(check_models.CASES) - set(SLOW)))
def test_quick_cases(case, family) -> None:
    if case == "adapters":
        pytest.importorskip("peft")
    check_models.CASES[case](family)


@pytest.mark.parametrize("case", SLOW)
def test_slow_cases(case) -> None:
    check_models.CASES[case](SLOW[case])


def test_a_model_of_images_is_exported_with_them() -> None:
    check_models.CASES["export"]("llava")
