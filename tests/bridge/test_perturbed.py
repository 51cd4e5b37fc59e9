"""A sample of scripts/perturb_bridge.py: what a conversion loses, by changing each tied weight, and others, alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from easytorch.bridge.jobs.targets import target_names

SEED = 0
# Every target with a family that it has names for; of the trees, families with ties of all kinds.
SAMPLE = {
    "torch": "llama",
    "dcp": "llama",
    "flax": "t5",
    "flax-safetensors": "bart",
    "orbax": "vit",
    "orbax-zarr": "resnet",
    "easydel": "llama",
    "easydel-msgpack": "mt5",
    "t5x": "mt5",
    "big_vision": "vit",
    "gguf": "llama",
    "maxtext": "llama",
    "maxtext-unscanned": "gemma",
    "gemma": "gemma",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/perturb_bridge.py."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "perturb_bridge.py"
    spec = importlib.util.spec_from_file_location("perturb_bridge", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_target_is_sampled():
    assert list(SAMPLE) and set(SAMPLE) == set(target_names())


@pytest.mark.parametrize("target", SAMPLE)
def test_every_tensor_comes_back(script, target, tmp_path):
    outcome = script.run(script.model_of(SAMPLE[target], SEED), target, 1, tmp_path)
    assert not outcome.losses, f"seed {SEED}"
    assert outcome.counts["returned"] and not outcome.counts["unsupported"]
    if target in ("easydel", "gguf", "maxtext", "maxtext-unscanned"):
        # A head that differs is carried there: refused is only what lacks a weight that an untied config asks for.
        assert outcome.counts["refused"] == 3, f"seed {SEED}"


def test_losses_are_seen(script):
    """What the script calls a loss: absent, changed, beside a repeat that is another, or nobody's."""
    one, other = np.arange(4.0), np.arange(4.0) + 1
    state, ties = {"a": one, "head": one, "b": other}, {"head": "a"}
    assert script.lost(state, {"a": one, "b": other}, ties, True) == []
    assert script.lost(state, {"head": one, "b": other}, ties, True) == []
    assert script.lost(state, {"a": one}, ties, True) == ["b is lost"]
    assert script.lost(state, {"a": one, "b": one}, ties, True) == ["b differs"]
    assert script.lost({**state, "head": other}, {"a": one, "b": other}, ties, True) == ["head is lost"]
    assert script.lost(state, {"a": one, "b": other, "c": other}, ties, True) == ["c is nobody's"]
