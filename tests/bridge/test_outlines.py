"""Outlines say what transformers builds, and conversions by them import neither torch nor transformers."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easytorch.bridge import outlines
from easytorch.bridge.architecture import Architecture, architecture_of
from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.convention import convention_rules, flax_rules
from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.families import Config
from easytorch.bridge.hub_names import HubNames
from easytorch.bridge.outline import Outline, OutlinedNames, outline_of
from easytorch.bridge.outlines.fields import UNKNOWN
from easytorch.bridge.rules import BUFFER

ROOT = Path(__file__).resolve().parents[2]
# Families stand in files of their own names; these are what they share.
FAMILIES = [one.name for one in pkgutil.iter_modules(outlines.__path__) if one.name not in ("fields", "weights")]
# Two sizes of each kind, so that one that stands in another's place is told from it. The padding token must fit.
_SIZES: dict[str, tuple[int, int]] = {
    "vocab_size": (37, 41),
    "hidden_size": (24, 48),
    "dim": (24, 48),
    "n_embd": (24, 48),
    "intermediate_size": (28, 34),
    "hidden_dim": (28, 34),
    "n_inner": (28, 34),
    "num_attention_heads": (4, 12),
    "n_heads": (4, 12),
    "n_head": (4, 12),
    "num_key_value_heads": (2, 4),
    "head_dim": (6, 10),
    "num_hidden_layers": (1, 3),
    "n_layers": (1, 3),
    "n_layer": (1, 3),
    "max_position_embeddings": (19, 23),
    "n_positions": (19, 23),
    "n_ctx": (19, 23),
    "type_vocab_size": (2, 5),
    "sliding_window": (8, 16),
}


def outline(family: str) -> Outline:
    return importlib.import_module(f"easytorch.bridge.outlines.{family}").OUTLINE


CLASSES = [(family, name) for family in FAMILIES for name in outline(family).heads]
each_class = pytest.mark.parametrize(("family", "name"), CLASSES)


def configs(family: str, name: str) -> Iterator[Config]:
    """Small ones of one class: what must be said alone, then with other sizes and switches."""
    fields = outline(family).fields
    least = {key: _SIZES[key][0] for key, field in fields.items() if field.default is UNKNOWN}
    yield _config(family, name, least)
    generator = random.Random(f"{family} {name}")
    for _ in range(4):
        drawn: dict[str, Any] = {key: generator.choice(_SIZES[key]) for key in fields if key in _SIZES}
        drawn |= {key: generator.random() < 0.5 for key, field in fields.items() if isinstance(field.default, bool)}
        drawn["tie_word_embeddings"] = generator.random() < 0.5
        drawn = {key: value for key, value in drawn.items() if key not in fields or fields[key].accepts(value)}
        labels = generator.randrange(1, 6)
        yield _config(family, name, {**drawn, "id2label": {str(one): f"label {one}" for one in range(labels)}})


def _config(family: str, name: str, content: dict[str, Any]) -> Config:
    return Config(Path("config.json"), {**content, "model_type": family, "architectures": [name]})


def _ties(architecture: Architecture) -> dict[str | None, str | None]:
    names = architecture.names
    return {names.hub_name(repeat): names.hub_name(source) for repeat, source in names.ties.items()}


@each_class
def test_an_outline_is_what_transformers_builds(family: str, name: str) -> None:
    for config in configs(family, name):
        outlined = outline_of(config, 1000)
        assert outlined is not None, config
        built = architecture_of(config, 1000)
        assert list(outlined.shapes.items()) == list(built.shapes.items()), config
        assert (outlined.name, outlined.base, outlined.tie) == (built.name, built.base, built.tie), config
        assert _ties(outlined) == _ties(built), config
        assert isinstance(outlined.names, OutlinedNames) and isinstance(built.names, HubNames)
        assert not built.names.fused
        usual = convention_rules(built.names, built.shapes)
        assert outlined.names.rules() == tuple(row for row in usual if row[2] != BUFFER) or family in ("bert", "llama")
        assert flax_rules(config, outlined)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_outline_does_not_know_is_left_to_transformers(family: str) -> None:
    name = next(iter(outline(family).heads))
    config = next(configs(family, name))
    assert outline_of(config, 1000) is not None
    (size,) = (key for key in ("hidden_size", "dim", "n_embd") if key in config.content)
    (heads,) = (key for key in ("num_attention_heads", "n_heads", "n_head") if key in config.content)
    (layers,) = (key for key in ("num_hidden_layers", "n_layers", "n_layer") if key in config.content)
    wrong: list[dict[str, Any]] = [
        {size: 0},
        {size: -4},
        {size: 24.0},
        {size: "24"},
        {size: True},
        {size: None},
        {heads: 5},
        {layers: 1_000_000},
        {"vocab_size": 0},
        {"pad_token_id": 37},
        {"pad_token_id": -1},
        {"architectures": [f"{name}ForNothing"]},
        {"quantization_config": {"bits": 4}},
        {"something": 1},
        {"dtype": "float31"},
        {"initializer_range": 2.0},
        {"tie_word_embeddings": "no"},
        {"id2label": {"0": "one", "00": "same"}},
        {"id2label": ["one"]},
    ]
    for changes in wrong:
        assert outline_of(Config(config.file, {**config.content, **changes}), 1000) is None, changes


def write(folder: Path, config: Config) -> dict[str, np.ndarray]:
    """A torch checkpoint of what `config` describes, tied weights once."""
    from safetensors.numpy import save_file

    outlined = outline_of(config, 1000)
    assert outlined is not None
    generator = np.random.default_rng(0)
    state = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in outlined.shapes.items()
        if name not in outlined.names.ties
    }
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.content))
    return state


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@each_class
def test_files_are_the_same_with_the_model_built(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, config = configs(family, name)
    write(tmp_path / "torch", config)
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    convert(tmp_path / "flax", tmp_path / "back", to="torch")
    with open_checkpoint(tmp_path / "torch") as checkpoint:
        checkpoint.renamed("flax")
        assert "architecture" not in vars(checkpoint), "the model was built"
    monkeypatch.setattr("easytorch.bridge.checkpoint.outline_of", lambda config, tensors: None)
    convert(tmp_path / "torch", tmp_path / "flax by transformers", to="flax")
    convert(tmp_path / "flax", tmp_path / "back by transformers", to="torch")
    assert content(tmp_path / "flax") == content(tmp_path / "flax by transformers")
    assert content(tmp_path / "back") == content(tmp_path / "back by transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_missing_left_over_or_of_another_shape_is_still_an_error(family: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    *_, name = outline(family).heads
    state = write(tmp_path / "torch", next(configs(family, name)))
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    first, *_, last = state
    weights = tmp_path / "torch" / "model.safetensors"
    for changed, message in (
        ({key: value for key, value in state.items() if key != last}, "is missing"),
        (state | {first: state[first][:-1]}, "has shape"),
        (state | {f"{last}2": state[last]}, "no rule of this family names it"),
    ):
        save_file(changed, weights, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "torch", tmp_path / "other", to="flax")


_HEAVY = """
import sys
from easytorch.cli.main import main
code = 0
try:
    main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code or 0
print("imported:", *sorted({"torch", "transformers", "jax", "flax"} & sys.modules.keys()))
sys.exit(code)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_commands_on_known_families_import_no_framework(family: str, tmp_path: Path) -> None:
    *_, name = outline(family).heads
    write(tmp_path / "torch", next(configs(family, name)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        ["convert", "torch", "flax", "--to", "flax"],
        ["convert", "flax", "back", "--to", "torch"],
        ["convert", "torch", "one", "--to", "flax-safetensors"],
        ["inspect", "torch"],
        ["inspect", "flax"],
        ["diff", "torch", "flax"],
        ["diff", "torch", "back"],
    ):
        line = [sys.executable, "-c", _HEAVY, *command]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "imported:", command
