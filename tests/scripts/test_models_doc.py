"""docs/models.md is what scripts/models_doc.py writes, and says what is known of some families."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("models_doc", ROOT / "scripts/models_doc.py")
assert _spec is not None and _spec.loader is not None
models_doc = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_doc)


def test_the_page_is_current() -> None:
    current = models_doc.page() == models_doc.PAGE.read_text()
    assert current, "run python scripts/models_doc.py --write"


def test_the_page_says_what_is_known() -> None:
    lines = models_doc.PAGE.read_text().splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if " | " in line}
    assert "PlainMLP" in rows["nemotron"] and "GatedMLP" not in rows["nemotron"]
    assert "LayerTypeRotaryEmbedding" in rows["gemma3_text"] and "PartialRotaryEmbedding" in rows["glm4"]
    assert "layer_norm" in rows["cohere"] and "rms_norm" not in rows["cohere"]
    assert "rotary" in rows["llama"] and "rotary" not in rows["gpt2"].rpartition(" | ")[2]
