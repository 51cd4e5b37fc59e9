"""scripts/check_architectures.py on types that were wrong once, and on a few drawn from all."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_architectures.py"
SEED, DRAWN = 9, 2

_spec = importlib.util.spec_from_file_location("check_architectures", SCRIPT)
assert _spec is not None and _spec.loader is not None
architectures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(architectures)

# type -> how many of its layers call ours; None: no matter how many, the numbers are transformers'.
OFFENDERS = {
    "pegasus_x": None,  # its decoder has is_causal=False and no mask
    "deepseek_v4": None,  # joins a mask made by name with one of its own
    "sam": None,  # these three build their layers by the name of the attention
    "sam_hq": None,
    "sam_vision_model": 0,
    "deepseek_vl_hybrid": None,
    "altclip": 4,  # these had the name and called ours in no layer
    "clipseg": None,
    "mllama": None,
    "kosmos-2": None,
    "t5": 6,  # rows that see no key
    "bigbird_pegasus": None,  # gradients of rows that see no key
    "falcon": 0,
    "qwen2_vl": None,
    "gemma4_text": 2,  # attributes that raise when they differ by layer
    "emu3": 2,  # a language model of a config that has images
    "sam2": None,
    "bert": 2,
    "llama": 2,
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_types_that_were_wrong(name) -> None:
    result = architectures.check(name, seed=SEED)
    assert result["status"] in ("equal", "stock"), result
    if OFFENDERS[name] is not None:
        assert result["called"] == OFFENDERS[name], result
    assert result["compared"] >= 2


def test_types_drawn_from_all() -> None:
    for name in random.Random(SEED).sample(architectures.model_types(), DRAWN):
        result = architectures.check(name, seed=SEED)
        assert result["status"] in ("equal", "stock", "not tried"), (SEED, result)


def test_the_table_names_every_type_of_this_transformers() -> None:
    import transformers

    page = (SCRIPT.parents[1] / "docs" / "architectures.md").read_text()
    if f"transformers {transformers.__version__}," not in page:
        pytest.skip("the table was made with another transformers")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert not set(architectures.model_types()) - set(rows)
    assert not [line for line in rows.values() if "| different |" in line or "| fails |" in line]
