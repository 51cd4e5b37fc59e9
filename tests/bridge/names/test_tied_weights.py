"""Which tied weights a checkpoint holds apart, and what its config is to say then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.names.architecture import Architecture, architecture_of
from easytorch.bridge.names.tied_weights import declares_ties, held_apart, untied

T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
TEXT = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


def described(name: str, **arguments: object) -> tuple[dict, Architecture]:
    """config.json's content of a class, and its architecture."""
    content = getattr(transformers, name).config_class(**arguments).to_dict() | {"architectures": [name]}
    return content, architecture_of(Config(Path("config.json"), content), 100)


def infos(*names: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, (20, 8), "float32") for name in names}


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_stored_head_is_apart_where_it_differs(alike, prefix):
    _, architecture = described("LlamaForCausalLM", **TEXT, tie_word_embeddings=True)
    stored = infos(f"{prefix}embed_tokens.weight", "lm_head.weight")
    asked = []

    def same(one, other):
        asked.append({one.sources[0], other.sources[0]})
        return alike

    assert held_apart(stored, architecture, same) == (frozenset() if alike else {"lm_head.weight"})
    assert asked == [set(stored)]
    for name in stored:
        assert held_apart(infos(name), architecture, same) == frozenset()


def test_what_configs_declare():
    content, architecture = described("LlamaForCausalLM", **TEXT)
    assert not declares_ties(content, architecture)
    content, architecture = described("T5ForConditionalGeneration", **T5)
    assert declares_ties(content, architecture)
    assert not declares_ties(content | {"tie_word_embeddings": False}, architecture)
    # As transformers 5 saves T5 1.1.
    assert not declares_ties(content | {"tie_word_embeddings": True, "scale_decoder_outputs": False}, architecture)


@pytest.mark.parametrize(
    ("name", "arguments", "apart", "says"),
    [
        ("LlamaForCausalLM", TEXT | {"tie_word_embeddings": True}, ["lm_head.weight"], {"torch", "flax", "easydel"}),
        ("LlamaForCausalLM", TEXT | {"tie_word_embeddings": True}, [], set()),
        # Its bias is still tied, and HF Flax's class has it once whatever the config says.
        ("BertForMaskedLM", TEXT, ["cls.predictions.decoder.weight"], {"flax"}),
        (
            "BertForMaskedLM",
            TEXT,
            ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
            {"torch", "flax", "easydel"},
        ),
        # Its forward scales the outputs of what is tied; mT5's does not.
        ("T5ForConditionalGeneration", T5, ["lm_head.weight"], set()),
        ("MT5ForConditionalGeneration", T5, ["lm_head.weight"], {"torch", "flax", "easydel"}),
    ],
)
def test_configs_that_say_that_weights_are_apart(name, arguments, apart, says):
    content, architecture = described(name, **arguments)
    architecture = replace(architecture, apart=frozenset(apart))
    for scheme in ("torch", "flax", "easydel"):
        made = untied(content, architecture, scheme)
        assert (made is not None) == (scheme in says), scheme
        if made is not None:
            assert made["tie_word_embeddings"] is False
            assert made | {"tie_word_embeddings": 0} == content | {"tie_word_embeddings": 0}


def test_the_configs_of_parts_say_it_too():
    text = transformers.LlamaConfig(**TEXT, tie_word_embeddings=True).to_dict()
    content, architecture = described("LlamaForCausalLM", **TEXT, tie_word_embeddings=True)
    architecture = replace(architecture, apart=frozenset(["lm_head.weight"]))
    made = untied(content | {"text_config": text}, architecture, "torch")
    assert made is not None and made["text_config"]["tie_word_embeddings"] is False
