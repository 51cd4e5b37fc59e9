"""Every Flax class that transformers had: its checkpoint gives a torch model that computes the same, and comes back.

The records are made by scripts/record_flax_trees.py with HF's own Flax classes; the checkpoints are written by flax.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax.serialization import msgpack_serialize
from safetensors.numpy import load_file, save_file

from easytorch import auto
from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.load_tree import load_tree
from easytorch.protocol import conversion

DATA = Path(__file__).parents[1] / "data" / "flax"
# Of each output's largest number; torch and Flax differ by a few units in the last place.
TOLERANCE = 1e-5

_spec = importlib.util.spec_from_file_location("fill", DATA / "fill.py")
assert _spec is not None and _spec.loader is not None
fill: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fill)


@dataclass(frozen=True)
class Loaded:
    """A recorded class, the leaves of its tree, the Flax checkpoint of them, and the torch model of that."""

    record: dict[str, Any]
    leaves: dict[str, np.ndarray]
    folder: Path
    model: Any


def _records() -> Iterator[Any]:
    for file in sorted(DATA.glob("*.json")):
        for record in json.loads(file.read_text()):
            name = f"{file.stem}-{record['torch_class']}-{record['variant']}".removesuffix("-")
            yield pytest.param(record, id=name)


@pytest.fixture(scope="module", params=_records())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    record = request.param
    folder = tmp_path_factory.mktemp("flax")
    leaves = write_flax(record, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class = auto_class_of(config, record["torch_class"])
    if auto_class is None:
        model = conversion.from_flax(getattr(transformers, record["torch_class"]), config, nested(leaves))
    else:
        model = auto_class.from_pretrained(folder)
    return Loaded(record, leaves, folder, model.eval())


def write_flax(record: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """The checkpoint of a recorded class, as HF Flax saves it; returns its leaves."""
    leaves = dict(fill.weights(record["tree"]))
    (folder / "flax_model.msgpack").write_bytes(msgpack_serialize(nested(leaves)))
    (folder / "config.json").write_text(json.dumps(record["config"]))
    return leaves


def auto_class_of(config: Any, name: str) -> Any:
    """The auto class that makes models of the class `name`; None for the two heads that none makes."""
    for found in (getattr(auto, auto_name) for auto_name in auto.MODELS):
        if type(config) in found._model_mapping:
            classes = found._model_mapping[type(config)]
            if name in [one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))]:
                return found
    return None


def assert_same_tree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for path, leaf in expected.items():
        assert found[path].shape == leaf.shape, path
        assert found[path].tobytes() == leaf.tobytes(), path


def test_the_torch_model_computes_what_flax_did(loaded: Loaded) -> None:
    record = loaded.record
    assert type(loaded.model).__name__ == record["torch_class"]
    arguments = fill.inputs(record["inputs"])
    with torch.no_grad():
        found = loaded.model(**{name: torch.from_numpy(array) for name, array in arguments.items()})
    for name, expected in record["outputs"].items():
        output = found[name].numpy()
        assert list(output.shape) == expected["shape"]
        errors = np.abs(fill.sample(name, output, arguments) - expected["numbers"]) / expected["scale"]
        assert errors.max() < TOLERANCE, name


def test_what_transformers_saves_becomes_the_same_tree_and_the_same_bytes(loaded: Loaded, tmp_path: Path) -> None:
    loaded.model.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    assert_same_tree(flat(load_tree(tmp_path / "flax")), loaded.leaves)
    convert(tmp_path / "flax", tmp_path / "again", to="torch")
    first, second = (tmp_path / name / "model.safetensors" for name in ("torch", "again"))
    assert sorted(load_file(first)) == sorted(load_file(second))
    assert first.read_bytes() == second.read_bytes()


def test_the_tree_goes_to_torch_and_back_bit_for_bit(loaded: Loaded, tmp_path: Path) -> None:
    convert(loaded.folder, tmp_path / "torch", to="torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    assert_same_tree(flat(load_tree(tmp_path / "flax")), loaded.leaves)


_MASK = np.tril(np.ones((1, 1, 37, 37), np.float32))


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("gpt2", {"transformer.h.1.attn.bias": _MASK, "transformer.h.1.attn.masked_bias": np.float32(-1e4)}),
        ("gpt_neo", {"transformer.h.1.attn.attention.masked_bias": np.float32(-1e9)}),
        ("gptj", {"transformer.h.1.attn.bias": _MASK, "transformer.h.1.attn.masked_bias": np.float32(-1e9)}),
        ("bart", {"model.encoder.version": np.float32([3]), "model.decoder.version": np.float32([3])}),
        ("clip", {"text_model.embeddings.position_ids": np.arange(37)[None]}),
        ("big_bird", {"bert.embeddings.position_ids": np.arange(43)[None]}),
    ],
)
def test_what_only_old_checkpoints_hold_stays_beside_the_tree(
    family: str, extra: dict[str, np.ndarray], tmp_path: Path
) -> None:
    heads = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "CLIPModel")
    records = json.loads((DATA / f"{family}.json").read_text())
    record = next(one for one in records if one["torch_class"].endswith(heads))
    (tmp_path / "flax").mkdir()
    leaves = write_flax(record, tmp_path / "flax")
    convert(tmp_path / "flax", tmp_path / "old", to="torch")
    file = tmp_path / "old" / "model.safetensors"
    old = load_file(file) | {name: np.asarray(array) for name, array in extra.items()}
    save_file(old, file, metadata={"format": "pt"})
    convert(tmp_path / "old", tmp_path / "new", to="flax")
    assert_same_tree(flat(load_tree(tmp_path / "new")), leaves)
    convert(tmp_path / "new", tmp_path / "again", to="torch")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert_same_tree(again, old)
