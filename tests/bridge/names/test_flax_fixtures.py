"""Whole checkpoints written by HF's Flax classes, with what these computed: loaded as a user would."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flax.serialization import msgpack_restore

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat

FAMILIES = {
    "bart": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForSequenceClassification",
    "clip": "AutoModel",
    "gemma": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "resnet": "AutoModelForImageClassification",
    "roberta": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "wav2vec2": "AutoModelForCTC",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
@pytest.mark.parametrize("options", [{}, {"from_flax": True}], ids=["found", "from_flax"])
def test_outputs_are_those_of_the_flax_class(
    family: str, options: dict[str, bool], flax_fixture: Callable[[str], Path]
) -> None:
    folder = flax_fixture(family)
    case = json.loads((folder / "case.json").read_text())
    with np.load(folder / "reference.npz") as reference:
        inputs = {name.removeprefix("input."): reference[name] for name in reference if name.startswith("input.")}
        expected = reference[f"output.{case['output']}"]
    auto_class = getattr(importlib.import_module("easytorch"), FAMILIES[family])
    model = auto_class.from_pretrained(folder, **options).eval()
    assert type(model).__name__ == case["torch_class"]
    given = {
        name: torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "i" else array)
        for name, array in inputs.items()
    }
    with torch.no_grad():
        found = model(**given)[case["output"]].numpy()
    mask = inputs.get("attention_mask")
    if mask is not None and found.shape[:2] == mask.shape:
        found, expected = found[mask > 0], expected[mask > 0]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@each_family
def test_round_trip_is_bit_exact(family: str, flax_fixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = flax_fixture(family)
    convert(folder, tmp_path / "torch", to="torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    before, after = (
        flat(msgpack_restore((place / "flax_model.msgpack").read_bytes())) for place in (folder, tmp_path / "flax")
    )
    assert sorted(before) == sorted(after)
    for path, leaf in before.items():
        assert (leaf.dtype, leaf.shape) == (after[path].dtype, after[path].shape)
        assert leaf.tobytes() == after[path].tobytes(), path
