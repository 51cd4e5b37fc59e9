"""Architectures that are refused, in one line that names what is wrong, and the memory of those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from easytorch.training import TrainingConfig, memory, train
from easytorch.training.architecture import build, check_architecture
from easytorch.training.config import default_model

SIZES = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hiden_size": 32}, "'llama' has no setting 'hiden_size' .nearest known name: 'hidden_size'"),
        ({"n_layer": 2}, "has no setting 'n_layer'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_attention_heads": -4}, "num_attention_heads must be at least 1, got -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5}, "hidden size .32. is not a multiple of the number of attention heads .5."),
        ({"num_attention_heads": 4.5}, "num_attention_heads"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"intermediate_size": -1}, "intermediate_size must be at least 1"),
        ({"rope_parameters": {"rope_type": "defualt", "rope_theta": 1e4}}, "rope_type 'defualt' .*'default'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "fctor": 2.0}},
            "rope_parameters has no setting 'fctor' .*'factor'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_size_or_key_is_named(wrong, said):
    with pytest.raises(ValueError, match=rf"model \(--model\): .*{said}"):
        build({**SIZES, **wrong})


@pytest.mark.parametrize(
    "settings",
    [
        {**SIZES, "rope_theta": 1e5, "attention_dropout": 0.1, "dtype": "float32", "tie_word_embeddings": True},
        {**SIZES, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_labels": 3, "architectures": ["X"]},
        {"model_type": "gpt2", "n_embd": 32, "num_attention_heads": 4, "n_layer": 1},
        {"model_type": "gpt2", "hidden_size": 32, "n_head": 4, "n_positions": 64},
        {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_every_spelling_transformers_knows_is_taken(settings):
    assert check_architecture(settings).hidden_size == 32


def test_a_setting_that_the_model_reads_and_its_config_does_not_declare_is_taken():
    sizes = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert build({**sizes, "head_dim": 8}).head_dim == 8
    with pytest.raises(ValueError, match="'qwen3_moe' has no setting 'head_dims'"):
        build({**sizes, "head_dims": 8})


def test_a_key_inside_a_key_is_looked_at():
    with pytest.raises(ValueError, match=r"text_config: .*has no setting 'hiden_size'"):
        build({"model_type": "gemma3", "text_config": {"hiden_size": 3}})


def test_sizes_that_only_the_model_finds_wrong_are_one_error(settings):
    with pytest.raises(ValueError, match=r"--model\): .*gelo"):
        train(settings(model={**SIZES, "hidden_act": "gelo"}))


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model \(--model\): there is no folder '.*/none'"):
        check_architecture(str(tmp_path / "none"))


def test_the_default_model_is_small_and_as_documented():
    parameters = memory.count_parameters(build({**default_model(), "vocab_size": 4096}))
    assert parameters == 4_196_608
    assert TrainingConfig(text=("a",), output="b").model == default_model()


def test_the_memory_of_a_model_is_counted():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *moments]
    assert sum(t.nbytes for t in held) == 110 * (memory.BYTES_A_WEIGHT + memory.STATE_BYTES["adamw"])


def test_more_than_there_is_is_refused_before_it_is_taken():
    large = build({"model_type": "llama", "vocab_size": 4096})
    parameters = memory.count_parameters(large)
    assert parameters == pytest.approx(6.5e9, rel=0.01)
    said = memory.needed(parameters, 2, False, 300 * 10**9)
    assert "6,509.83 M parameters take 104 GB of memory in each of 2 process(es)" in said
    with pytest.raises(ValueError, match="That is 208 GB, and this machine has 200 GB: give a smaller model"):
        memory.needed(parameters, 2, False, 200 * 10**9)
    assert memory.needed(parameters, 2, True, 110 * 10**9)  # a GPU each
    with pytest.raises(ValueError, match="That is 104 GB, and a GPU has 80 GB"):
        memory.needed(parameters, 2, True, 80 * 10**9)
    assert memory.needed(parameters, 2, False, None) == said


def test_a_run_says_what_it_will_take(settings, monkeypatch, capsys):
    train(settings(steps=1))
    assert "M parameters take " in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    config = settings("other")
    with pytest.raises(ValueError, match=r"this machine has 1e\+03 B|this machine has 1 KB"):
        train(config)
    assert not Path(config.output).exists()


def test_this_machine_has_memory():
    found = memory.available_bytes(torch.device("cpu"))
    assert found is None or found > 2**28
