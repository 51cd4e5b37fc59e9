"""A resumed run has the settings of its checkpoint, or says which differ."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from easytorch.training import train
from easytorch.training.checkpoint import load_state
from easytorch.training.prepare import check_inputs
from easytorch.training.resume import check_same, fingerprint


@pytest.fixture
def trained(settings):
    """The config of a finished run of two steps, to be resumed."""
    config = settings(steps=2, eval_fraction=0.1)
    train(config)
    return dataclasses.replace(config, resume=True)


def test_a_model_with_parameters_that_get_no_gradient_is_resumed(settings, partly_unused):
    config = settings(steps=4, save_every=2, eval_fraction=0.0, model=partly_unused)
    last = train(config).checkpoint
    expected = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    assert load_state(last.with_name("checkpoint-2"))["without_moments"]
    assert train(dataclasses.replace(config, resume=True)).checkpoint == last
    assert_close(load_file(last / "model.safetensors"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changed",
    [
        {"block_size": 16},
        {"batch_size": 4},
        {"micro_batch_size": 2},
        {"steps": 5},
        {"learning_rate": 1e-4},
        {"min_learning_rate": 1e-5},
        {"schedule": "linear"},
        {"warmup_steps": 3},
        {"weight_decay": 0.2},
        {"beta1": 0.8},
        {"beta2": 0.9},
        {"grad_clip": 0.5},
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"attn_implementation": "sdpa"},
        {"eval_fraction": 0.2},
        {"vocab_size": 301},
        {"model": {"model_type": "llama", "hidden_size": 64}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_setting_is_refused_and_named(trained, changed):
    ((name, value),) = changed.items()
    other = dataclasses.replace(trained, **changed)
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"checkpoint-2 was trained with other settings: {flag} is .*it had"):
        check_inputs(other, 1)
    if name in ("model", "vocab_size"):
        return
    notes = check_inputs(dataclasses.replace(other, change=(name,)), 1).notes
    assert any(note.startswith(f"changed for the rest of this run: {flag} is {value!r}") for note in notes)


def test_settings_that_decide_nothing_may_differ(trained):
    other = dataclasses.replace(trained, save_every=1, log_every=3, keep_checkpoints=5, eval_every=2)
    assert not [note for note in check_inputs(other, 1).notes if "changed" in note]


def test_another_text_is_refused_and_another_name_of_it_is_not(trained, tmp_path):
    renamed = tmp_path / "renamed.txt"
    renamed.write_bytes(Path(trained.text[0]).read_bytes())
    check_inputs(dataclasses.replace(trained, text=(str(renamed),)), 1)
    tokens = (Path(trained.output) / "data" / "tokens.npy").read_bytes()
    renamed.write_text(renamed.read_text()[:-1] + "!")
    with pytest.raises(ValueError, match=r"--text has other content \(.*renamed\.txt, and it had .*corpus\.txt\)"):
        train(dataclasses.replace(trained, text=(str(renamed),)))
    assert (Path(trained.output) / "data" / "tokens.npy").read_bytes() == tokens


def test_another_number_of_processes_is_refused(trained):
    with pytest.raises(ValueError, match="--processes is 2, and it had 1"):
        check_inputs(trained, 2)
    check_inputs(dataclasses.replace(trained, change=("processes",)), 2)


def test_documents_are_told_apart():
    assert len({fingerprint(texts) for texts in (["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""])}) == 4


def test_all_differences_are_listed_at_once():
    stored = {"a": 1, "text": {"files": ["x"], "sha256": "1"}}
    with pytest.raises(ValueError, match=r"--a is 2, and it had 1; --text .*--change a text$"):
        check_same(stored, {"a": 2, "text": {"files": ["y"], "sha256": "2"}}, (), "c")
    with pytest.raises(ValueError, match=r"other settings: --text [^;]*\. Resume.*--change a text$"):
        check_same(stored, {"a": 2, "text": {"files": ["y"], "sha256": "2"}}, ("a",), "c")


def test_past_the_end_it_says_so_and_more_steps_go_on(trained, capsys):
    result = train(trained)
    assert result.steps == 2 and result.checkpoint.name == "checkpoint-2"
    assert "nothing is left to train" in capsys.readouterr().out
    result = train(dataclasses.replace(trained, steps=4, change=("steps",)))
    assert result.steps == 4 and result.checkpoint.name == "checkpoint-4"
    said = capsys.readouterr().out
    assert "changed for the rest of this run: --steps is 4, and it had 2" in said and "nothing is left" not in said


def test_a_changed_optimizer_setting_is_taken(trained):
    changed = dataclasses.replace(
        trained, steps=3, weight_decay=0.25, beta2=0.5, change=("steps", "weight_decay", "beta2")
    )
    groups = load_state(train(changed).checkpoint)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert all(tuple(group["betas"]) == (0.9, 0.5) for group in groups)


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default():
    now = {"optimizer": "lion", "text": {"files": ["x"], "sha256": "1"}}
    with pytest.raises(ValueError, match="--optimizer is 'lion', and it had 'adamw'"):
        check_same({"text": now["text"]}, now, (), "c")
    assert check_same({"text": now["text"]}, {**now, "optimizer": "adamw"}, (), "c") == []


def test_without_a_checkpoint_it_says_that_it_begins(settings, capsys):
    train(settings(steps=1, resume=True))
    assert "has no checkpoint to resume: this run starts from the beginning" in capsys.readouterr().out


def test_a_checkpoint_without_settings_is_resumed_with_a_word(trained, capsys):
    path = Path(trained.output) / "checkpoint-2" / "training_state.pt"
    state = torch.load(path)
    del state["settings"]
    torch.save(state, path)
    train(trained)
    assert "does not store its settings" in capsys.readouterr().out
