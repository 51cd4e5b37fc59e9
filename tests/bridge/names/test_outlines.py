"""Outlines say what transformers builds, and conversions by them import neither torch nor transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.convert import convert
from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.names.outline import Outline, outline_of, read_outline
from scripts.outlines.family import compared, differences
from scripts.outlines.samples import Sampler, Settings

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = sorted(
    file.name.removesuffix(".json")
    for file in files("easytorch.bridge.names.outlines").iterdir()
    if file.name.endswith(".json")
)
# Families of which every class is compared here; of the others one (`scripts/outline_tables.py --check`: all of them).
_ALL = ("bert", "distilbert", "gpt2", "llama", "t5")


def outline(family: str) -> Outline:
    found = read_outline(family)
    assert found is not None
    return found


def classes(family: str) -> list[str]:
    return [name for name, described in outline(family).classes.items() if described is not None]


def config_of(family: str, name: str | None, **settings: Any) -> Config:
    """A small one that the outline answers for: tiny sizes of every key, and `settings`."""
    sampler = Sampler(family)
    generator = random.Random(f"{family} {name}")
    for _ in range(100):
        drawn: Settings = sampler.drawn(generator, often=1.1)
        drawn.pop("id2label", None)
        config = sampler.config(drawn | settings, name)
        if outline_of(config, 1000) is not None:
            return config
    raise AssertionError(f"no config of {name} is answered")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_is_what_transformers_builds(family: str) -> None:
    seed = random.randrange(1 << 30)
    some = classes(family) if family in _ALL else [random.choice(classes(family))]
    for name in some:
        assert not list(differences(family, seed, 3, name))


@pytest.mark.parametrize("family", ["t5", "gpt2", "bert"])
def test_an_outline_that_is_wrong_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = classes(family)[0]
    outlined, wrong = (outline_of(config_of(family, name), 1000) for _ in range(2))
    assert outlined is not None and wrong is not None
    first, *_ = wrong.shapes
    assert not list(compared(outlined, built(family, name)))
    wrong.shapes[first] = (1, 2)
    assert any(first in text for text in compared(wrong, built(family, name)))


def built(family: str, name: str) -> Architecture:
    """What transformers builds of `config_of(family, name)`."""
    from easytorch.bridge.names.architecture import architecture_of

    return architecture_of(config_of(family, name), 1000)


# The keys of the sizes and counts of some families.
_KEYS = {
    "bert": ("hidden_size", "num_attention_heads", "num_hidden_layers"),
    "distilbert": ("dim", "n_heads", "n_layers"),
    "gpt2": ("n_embd", "n_head", "n_layer"),
    "roberta": ("hidden_size", "num_attention_heads", "num_hidden_layers"),
}


@pytest.mark.parametrize("family", _KEYS)
def test_what_an_outline_does_not_know_is_left_to_transformers(family: str) -> None:
    name = classes(family)[0]
    config = config_of(family, name)
    size, heads, layers = _KEYS[family]
    wrong: list[dict[str, Any]] = [
        {size: 0},
        {size: -4},
        {size: 24.0},
        {size: "24"},
        {size: True},
        {size: None},
        {heads: 13},
        {layers: 1_000_000},
        {"vocab_size": 0},
        *([{"pad_token_id": 1000}] if "pad_token_id<vocab_size" in outline(family).fits else []),
        {"pad_token_id": -1},
        {"architectures": [f"{name}ForNothing"]},
        {"quantization_config": {"bits": 4}},
        {"something": 1},
        {"gradient_checkpointing": True},
        {"pruned_heads": {"0": [1]}},
        {"position_embedding_type": "relative_key"},
        {"dtype": "float31"},
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


def outcome(source: Path, destination: Path, to: str) -> object:
    """The files of a conversion, or what it says instead."""
    try:
        report = convert(source, destination, to=to)
    except CheckpointError as error:
        return str(error)
    return content(destination), report.notes, report.kept, report.tied


def same_without_outlines(source: Path, to: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> object:
    """The outcome, which must be that of the model built."""
    made = outcome(source, folder / "by outline" / "made", to)
    with monkeypatch.context() as patched:
        patched.setattr("easytorch.bridge.checkpoint.outline_of", lambda *given: None)
        usual = outcome(source, folder / "by transformers" / "made", to)
    assert made == usual
    return made


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    for name in ("by outline", "by transformers"):
        (tmp_path / name).mkdir()
    return tmp_path


def is_outlined(source: Path, to: str) -> bool:
    with open_checkpoint(source) as checkpoint:
        checkpoint.renamed(to)
        return "architecture" not in vars(checkpoint)


# Native tables, the convention's, and one with differences of its own.
_CONVERTED = [
    ("llama", "LlamaForCausalLM"),
    ("bert", "BertForMaskedLM"),
    ("distilbert", "DistilBertForQuestionAnswering"),
    ("gpt2", "GPT2DoubleHeadsModel"),
    ("t5", "T5ForConditionalGeneration"),
]


@pytest.mark.parametrize(("family", "name"), _CONVERTED)
def test_files_are_the_same_with_the_model_built(
    family: str, name: str, twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(twice / "torch", config_of(family, name))
    convert(twice / "torch", twice / "flax", to="flax")
    assert is_outlined(twice / "torch", "flax") and is_outlined(twice / "flax", "torch")
    same_without_outlines(twice / "torch", "flax", monkeypatch, twice)
    for folder in ("by outline", "by transformers"):
        (twice / folder / "made").rename(twice / folder / "flax")
    same_without_outlines(twice / "flax", "torch", monkeypatch, twice)


@pytest.mark.parametrize(("family", "name"), [("bert", "BertForMaskedLM"), ("distilbert", "DistilBertForMaskedLM")])
def test_checkpoints_that_hold_more_less_or_other_names(
    family: str, name: str, twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another head's weights, buffers of old, the base model alone, old names of norms; missing, wrong and unknown."""
    from safetensors.numpy import save_file

    config = config_of(family, name)
    state = write(twice / "torch", config)
    start = f"{family}."
    other = {f"{start}embeddings.position_ids": np.arange(16)[None], "classifier.weight": state[next(iter(state))][:2]}
    first, *_, last = state
    cases: dict[str, tuple[dict[str, np.ndarray], bool]] = {
        "buffer": (state | dict([next(iter(other.items()))]), True),
        "base": ({key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}, True),
        "missing": ({key: value for key, value in state.items() if key != first}, True),
        "shape": (state | {first: state[first][:-1]}, True),
        "unknown": (state | {f"{last}2": state[last]}, False),
        "old": ({key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in state.items()}, False),
    }
    for number, (changed, answered) in enumerate(cases.values()):
        folder, results = twice / f"case {number}", twice / f"results {number}"
        folder.mkdir()
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config.content))
        for one in ("by outline", "by transformers"):
            (results / one).mkdir(parents=True)
        result = same_without_outlines(folder, "flax", monkeypatch, results)
        if answered and not isinstance(result, str):
            assert is_outlined(folder, "flax")


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


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_commands_on_known_families_import_no_framework(family: str, tmp_path: Path) -> None:
    write(tmp_path / "torch", config_of(family, classes(family)[-1]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        ["convert", "torch", "flax", "--to", "flax"],
        ["convert", "flax", "back", "--to", "torch"],
        ["convert", "torch", "one", "--to", "flax-safetensors"],
        ["inspect", "flax"],
        ["diff", "torch", "flax"],
    ):
        line = [sys.executable, "-c", _HEAVY, *command]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "imported:", command
