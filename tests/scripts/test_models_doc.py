"""docs/models.md is what scripts/models_doc.py writes, and says what is known of some families."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("models_doc", ROOT / "scripts/models_doc.py")
assert _spec is not None and _spec.loader is not None
models_doc = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_doc)


def test_the_page_is_current() -> None:
    """In a process of its own, as it is written: what other tests leave behind changes what a model calls."""
    requirements = (ROOT / "scripts/requirements/test.txt").read_text()
    pinned = re.findall(r"^transformers==(\d+\.\d+)\.", requirements, re.MULTILINE)
    if pinned != re.findall(r"^\d+\.\d+", importlib.metadata.version("transformers")):
        pytest.skip(f"the page is of transformers {pinned[0]}, whose types it lists")
    command = [sys.executable, str(ROOT / "scripts/models_doc.py"), "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_the_page_says_what_is_known() -> None:
    lines = models_doc.PAGE.read_text().splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if " | " in line}
    assert "PlainMLP" in rows["nemotron"] and "GatedMLP" not in rows["nemotron"]
    assert "LayerTypeRotaryEmbedding" in rows["gemma3_text"] and "PartialRotaryEmbedding" in rows["glm4"]
    assert "layer_norm" in rows["cohere"] and "rms_norm" not in rows["cohere"]
    assert "rotary" in rows["llama"] and "rotary" not in rows["gpt2"].rpartition(" | ")[2]
