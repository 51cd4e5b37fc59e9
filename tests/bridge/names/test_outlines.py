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
from transformers import LongT5Config

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


def test_a_setting_that_the_config_class_overrides() -> None:
    """LongT5's says that embeddings are tied whatever config.json says; its stack has no head that would be."""
    content = {"model_type": "longt5", "tie_word_embeddings": False}
    outlined = outline("longt5").architecture(Config(Path("config.json"), content), "LongT5Stack")
    assert outlined is not None and not outlined.names.ties and outlined.tie
    assert LongT5Config(tie_word_embeddings=False).tie_word_embeddings


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


def is_outlined(source: Path, to: str, config: Path | None = None) -> bool:
    with open_checkpoint(source, config=config) as checkpoint:
        checkpoint.in_scheme(to)
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


def tensors_of(folder: Path) -> tuple[dict[str, np.ndarray], str]:
    with open_checkpoint(folder) as checkpoint:
        arrays = {name: checkpoint.reader.read(name).copy() for name in checkpoint.reader.tensors}
    return arrays, (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("family", "name", "to"),
    [
        ("llama", "LlamaForCausalLM", "maxtext"),
        ("qwen3", "Qwen3ForCausalLM", "maxtext-unscanned"),
        ("gemma2", "Gemma2ForCausalLM", "gemma"),
        ("mixtral", "MixtralForCausalLM", "easydel"),
    ],
)
def test_other_programs_trees_are_the_same_with_the_model_built(
    family: str, name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    config = config_of(family, name, tie_word_embeddings=True, **settings)
    write(tmp_path / "torch", config)
    convert(tmp_path / "torch", tmp_path / "tree", to=to)
    convert(tmp_path / "tree", tmp_path / "back", to="torch", config=tmp_path / "torch")
    assert is_outlined(tmp_path / "torch", to)
    # An EasyDeL tree is read with the model built.
    assert is_outlined(tmp_path / "tree", "torch", tmp_path / "torch") == (to != "easydel")
    with monkeypatch.context() as patched:
        patched.setattr("easytorch.bridge.checkpoint.outline_of", lambda *given: None)
        convert(tmp_path / "torch", tmp_path / "usual tree", to=to)
        convert(tmp_path / "usual tree", tmp_path / "usual back", to="torch", config=tmp_path / "torch")
    for one in ("tree", "back"):
        (made, said), (usual, usually_said) = tensors_of(tmp_path / one), tensors_of(tmp_path / f"usual {one}")
        assert list(made) == list(usual) and said == usually_said
        assert all(np.array_equal(made[key], usual[key]) for key in usual)


_GENERATION = {"num_beams": 4, "early_stopping": True, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3}
_PART = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "attention_dropout": 0.0,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "do_sample": False,
    "finetuning_task": None,
    "hidden_act": "quick_gelu",
    "initializer_range": 0.02,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "return_dict": True,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "torch_dtype": None,
    "torchscript": False,
    "transformers_version": "4.16.0.dev0",
    "use_bfloat16": False,
}
# As checkpoints on the Hub have them, written by several versions of transformers.
_IN_THE_WILD: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {
        "model_type": "bart",
        "_name_or_path": "bart-base",
        "activation_dropout": 0.1,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "classif_dropout": 0.1,
        "classifier_dropout": 0.0,
        "d_model": 768,
        "decoder_attention_heads": 12,
        "decoder_ffn_dim": 3072,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 6,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 6,
        "eos_token_id": 2,
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
        "max_position_embeddings": 1024,
        "normalize_before": False,
        "normalize_embedding": True,
        "num_hidden_layers": 6,
        "pad_token_id": 1,
        "scale_embedding": False,
        "torch_dtype": "float32",
        "transformers_version": "4.12.0.dev0",
        "use_cache": True,
        "vocab_size": 50265,
        **_GENERATION,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "eos_token_id": 2,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
    "GPTNeoForCausalLM": {
        "model_type": "gpt_neo",
        "activation_function": "gelu_new",
        "attention_dropout": 0.0,
        "attention_layers": ["global", "local"] * 6,
        "attention_types": [[["global", "local"], 6]],
        "bos_token_id": 50256,
        "embed_dropout": 0.0,
        "eos_token_id": 50256,
        "gradient_checkpointing": False,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 2048,
        "num_heads": 12,
        "num_layers": 12,
        "resid_dropout": 0.0,
        "transformers_version": "4.9.0.dev0",
        "use_cache": True,
        "vocab_size": 50257,
        "window_size": 256,
    },
    "CLIPModel": {
        "model_type": "clip",
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "projection_dim": 512,
        "text_config": {
            **_PART,
            "bos_token_id": 0,
            "dropout": 0.0,
            "eos_token_id": 2,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "max_position_embeddings": 77,
            "model_type": "clip_text_model",
            "vocab_size": 49408,
        },
        "text_config_dict": None,
        "torch_dtype": "float32",
        "transformers_version": None,
        "vision_config": {
            **_PART,
            "hidden_size": 768,
            "image_size": 224,
            "intermediate_size": 3072,
            "model_type": "clip_vision_model",
            "num_attention_heads": 12,
            "patch_size": 32,
        },
        "vision_config_dict": None,
    },
}


@pytest.mark.parametrize("name", _IN_THE_WILD)
def test_configs_on_the_hub_are_answered_as_transformers_does(name: str) -> None:
    from easytorch.bridge.names.architecture import architecture_of

    config = Config(Path("config.json"), {"architectures": [name], **_IN_THE_WILD[name]})
    outlined = outline_of(config, 1000)
    assert outlined is not None
    assert not list(compared(outlined, architecture_of(config, 1000)))


def test_lists_with_an_entry_a_layer() -> None:
    """Of so many layers, of words that are known; a mapping in a list's place, a list in a part's, get no answer."""
    neo = _IN_THE_WILD["GPTNeoForCausalLM"]
    for wrong in ([[["global", "local"], 5]], [[["global", "far"], 6]], [["global", 6]], [], None, "global"):
        assert outline_of(Config(Path("config.json"), {**neo, "attention_types": wrong}), 1000) is None, wrong
    qwen = config_of("qwen3", "Qwen3ForCausalLM", num_hidden_layers=2).content
    full = ["full_attention", "sliding_attention"]
    assert outline_of(Config(Path("config.json"), {**qwen, "layer_types": full}), 1000) is not None
    for types in (full[:1], [*full, *full], ["full_attention", "linear_attention"], {"0": "full_attention"}, full[0]):
        assert outline_of(Config(Path("config.json"), {**qwen, "layer_types": types}), 1000) is None, types
    clip = _IN_THE_WILD["CLIPModel"]
    for part in ([], 1, {"vocab_size": "many"}, {"something": 1}, {"model_type": "siglip_text_model"}):
        assert outline_of(Config(Path("config.json"), {**clip, "text_config": part}), 1000) is None, part


def test_a_class_that_transformers_keeps_to_itself_is_none_of_a_config() -> None:
    hidden = [name for name, one in outline("bart").classes.items() if one and not one.get("public", True)]
    assert hidden
    for name in hidden:
        assert outline_of(Config(Path("config.json"), {"model_type": "bart", "architectures": [name]}), 1000) is None


def test_a_family_called_by_a_path_has_no_outline(tmp_path: Path) -> None:
    content = (ROOT / "bridge" / "names" / "outlines" / "bert.json").read_text()
    (tmp_path / "evil.json").write_text(content)
    assert read_outline(str(tmp_path / "evil")) is None
    assert read_outline("../outlines/bert") is None
    assert read_outline("bert") is not None


def test_labels_that_a_family_has_without_being_told() -> None:
    outlined = outline_of(config_of("bart", "BartForSequenceClassification"), 1000)
    assert outlined is not None and outlined.shapes["classification_head.out_proj.bias"] == (3,)


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
        ["convert", "torch", "easydel", "--to", "easydel"],
        ["inspect", "flax"],
        ["diff", "torch", "flax"],
    ):
        line = [sys.executable, "-c", _HEAVY, *command]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "imported:", command
