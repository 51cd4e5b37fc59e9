"""One process: what is learnt, resumed, interrupted and written. Two processes are in test_torchrun.py."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers

import easytorch
from easytorch.training import latest_checkpoint, launch, loop, output_lock, train
from easytorch.training.metrics import read_metrics
from easytorch.training.output_lock import only_run
from easytorch.training.report import ProgressReport


def losses(config):
    return [line["loss"] for line in read_metrics(Path(config.output) / "metrics.jsonl") if "loss" in line]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def test_the_loss_falls_and_transformers_loads_the_checkpoint(settings):
    config = settings(steps=30)
    result = train(config)
    assert (result.steps, result.interrupted) == (30, False)
    assert result.checkpoint == latest_checkpoint(config.output) == Path(config.output) / "checkpoint-30"
    found = losses(config)
    assert len(found) == 30
    assert sum(found[-3:]) / 3 < found[0] - 1.0
    held_out = [
        line["eval_loss"] for line in read_metrics(Path(config.output) / "metrics.jsonl") if "eval_loss" in line
    ]
    assert len(held_out) == 6 and held_out[-1] < held_out[0]
    assert (Path(config.output) / "loss.png").stat().st_size > 5000

    tokenizer = transformers.AutoTokenizer.from_pretrained(result.checkpoint)
    ours = easytorch.AutoModelForCausalLM.from_pretrained(result.checkpoint).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.checkpoint).eval()
    assert type(theirs).__module__.startswith("transformers.")
    inputs = tokenizer("the class statement", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-5, atol=1e-5)


def test_accumulation_changes_nothing(settings):
    whole, pieces = settings("whole"), settings("pieces", micro_batch_size=2)
    train(whole)
    train(pieces)
    assert losses(pieces) == pytest.approx(losses(whole), rel=1e-5)


def test_the_seed_decides(settings):
    configs = [settings("a", seed=1), settings("b", seed=1), settings("c", seed=2)]
    for config in configs:
        train(config)
    assert losses(configs[0]) == losses(configs[1])
    assert losses(configs[0]) != losses(configs[2])


def test_resume_gives_what_an_uninterrupted_run_gives(settings, monkeypatch):
    whole, broken = settings("whole"), settings("broken", save_every=4, eval_fraction=0.1)
    whole = dataclasses.replace(whole, eval_fraction=0.1)
    train(whole)

    def fail_at_seven(self, step, **figures):
        original(self, step, **figures)
        if step == 7:
            raise RuntimeError("power cut")

    original = ProgressReport.step
    monkeypatch.setattr(ProgressReport, "step", fail_at_seven)
    with pytest.raises(RuntimeError, match="power cut"):
        train(broken)
    monkeypatch.undo()
    assert latest_checkpoint(broken.output) == Path(broken.output) / "checkpoint-4"
    result = train(dataclasses.replace(broken, resume=True))
    assert losses(broken) == losses(whole)
    expected = weights(Path(whole.output) / "checkpoint-10")
    got = weights(result.checkpoint)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(settings, monkeypatch, name):
    def signal_at_three(self, step, **figures):
        original(self, step, **figures)
        if step == 3:
            os.kill(os.getpid(), name)

    original, before = ProgressReport.step, signal.getsignal(name)
    monkeypatch.setattr(ProgressReport, "step", signal_at_three)
    result = train(settings())
    assert (result.steps, result.interrupted) == (3, True)
    assert result.checkpoint.name == "checkpoint-3"
    assert signal.getsignal(name) is before


def test_bfloat16_autocast_keeps_float32_weights(settings):
    config = settings(dtype="bfloat16", steps=5)
    result = train(config)
    assert {tensor.dtype for tensor in weights(result.checkpoint).values()} == {torch.float32}
    assert losses(config) != losses_of_float32(settings)


def losses_of_float32(settings):
    config = settings("float32", steps=5)
    train(config)
    return losses(config)


def test_a_pretrained_model_is_trained_further_with_its_tokenizer(settings):
    first = settings("first", steps=20)
    start = train(first).checkpoint
    second = settings("second", model=str(start), vocab_size=9999, steps=3, warmup_steps=0, learning_rate=1e-4)
    result = train(second)
    # the losses are of other batches, hence 0.5; one that was not trained before is at ln(300) = 5.7
    assert losses(second)[0] == pytest.approx(losses(first)[-1], abs=0.5)
    assert losses(second)[0] < losses(first)[0] - 1
    assert (result.checkpoint / "tokenizer.json").read_text() == (start / "tokenizer.json").read_text()


def test_a_new_run_does_not_mix_with_an_old_one(settings):
    train(settings(steps=1))
    with pytest.raises(FileExistsError, match="already has checkpoint-1"):
        train(settings(steps=2))


def test_a_block_longer_than_the_models_positions_is_refused(settings):
    sizes = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}
    with pytest.raises(ValueError, match="max_position_embeddings 16"):
        train(settings(model=sizes))


def test_bad_settings_are_refused_before_anything_is_written(settings):
    with pytest.raises(ValueError, match="does not divide"):
        train(settings(batch_size=8, micro_batch_size=3))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU"):
            train(settings(device="cuda"))
    assert not Path(settings().output).exists()


def test_a_forced_attention_is_the_models(settings):
    from easytorch.training.prepare import make_model
    from easytorch.training.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["a text"], 257)
    for name in ("vanilla", "flash"):
        config = settings(attn_implementation=name)
        assert make_model(config, tokenizer, None, torch.device("cpu")).config._attn_implementation == name


def test_a_tokenizer_of_another_model_is_refused(settings):
    small = settings("small", vocab_size=280, steps=1)
    folder = train(small).checkpoint
    large = settings("large", vocab_size=300, steps=1)
    shutil.copy(train(large).checkpoint / "tokenizer.json", folder)
    mixed = settings("mixed", model=str(folder))
    with pytest.raises(ValueError, match=r"has embeddings for 280: the tokenizer is another model's"):
        train(mixed)
    assert not Path(mixed.output).exists(), "what was tokenized is left behind"


def test_what_was_there_before_a_run_that_does_not_begin_stays(settings, monkeypatch):
    monkeypatch.setattr(loop, "make_optimizer", Mock(side_effect=ValueError("no optimizer")))
    for name, made in (("file", "notes.txt"), ("data", "data/notes.txt")):
        config = settings(name)
        notes = Path(config.output) / made
        notes.parent.mkdir(parents=True)
        notes.write_text("kept")
        with pytest.raises(ValueError, match="no optimizer"):
            train(config)
        assert notes.read_text() == "kept"
        assert (Path(config.output) / "data").exists() == (name == "data")


def test_two_runs_do_not_write_into_one_folder(settings):
    config = settings(steps=1)
    output = Path(config.output)
    output.mkdir()
    (output / "notes.txt").write_text("kept")
    with only_run(output):
        for start in (train, lambda one: launch(one, 1)):
            with pytest.raises(FileExistsError, match=r"output \(--output\) .*: another run is writing there"):
                start(config)
        assert [path.name for path in output.iterdir()] == ["notes.txt"]
    assert train(config).steps == 1
    with only_run(output):  # which the run has let go
        pass


def test_a_launch_keeps_its_settings_until_its_processes_have_read_them(settings, monkeypatch):
    config, other, asked = settings(steps=1), settings(steps=2), []
    written = Path(config.output) / "training.json"

    class Starting:
        """Processes that have not come to lock the folder, when another run is launched into it."""

        def __init__(self, command, env):
            asked.append(command)

        def wait(self):
            with pytest.raises(FileExistsError, match="another run is writing there"):
                launch(other, 1)
            assert json.loads(written.read_text())["steps"] == 1
            return 0

    monkeypatch.setattr(sys.modules[launch.__module__].subprocess, "Popen", Starting)
    launch(config, 1)
    assert len(asked) == 1
    with only_run(written.parent, written):  # which is let go
        pass


@pytest.mark.parametrize("system", ["without locks", "with locks"])
def test_a_folder_that_cannot_be_opened_is_written_to_without_a_lock(tmp_path, monkeypatch, system):
    def refuse(*given):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output_lock.os, "open", refuse)
    if system == "without locks":
        monkeypatch.setattr(output_lock.importlib.util, "find_spec", lambda name: None)
    with only_run(tmp_path):
        pass
