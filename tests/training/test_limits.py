"""The ends of what is accepted, one beyond each, and a run in which no setting has its default."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from easytorch.training import TrainingConfig, launch, memory, train
from easytorch.training.architecture import build, check_architecture, check_positions
from easytorch.training.config import LARGEST_COUNT, LARGEST_SEED, NOT_COMPARED
from easytorch.training.data import read_texts, split_blocks, tokenize
from easytorch.training.metrics import read_metrics
from easytorch.training.optim import learning_rate
from easytorch.training.optimizers import make_optimizer
from easytorch.training.plot import _smoothed
from easytorch.training.processes import OtherProcessError, Processes

COUNTS = ("batch_size", "micro_batch_size", "steps", "eval_every", "log_every", "keep_checkpoints")
ACCEPTED = [
    *({name: 1} for name in COUNTS),
    *({name: LARGEST_COUNT} for name in COUNTS if "batch" not in name),
    {"vocab_size": 257}, {"block_size": 2}, {"warmup_steps": 0}, {"save_every": 0},
    {"schedule": "wsd", "decay_steps": 8}, {"schedule": "wsd", "decay_steps": 1},
    {"eval_fraction": 0.0}, {"beta1": 0.0}, {"beta2": 0.0}, {"grad_clip": 0.0}, {"weight_decay": 0.0},
    {"learning_rate": 0.0}, {"min_learning_rate": 5e-3}, {"schedule": "constant", "min_learning_rate": 0.1},
    {"seed": 0}, {"seed": LARGEST_SEED}, {"learning_rate": 1}, {"micro_batch_size": None}, {"mesh": "dp=1,pp=1"},
]  # fmt: skip
REFUSED = [
    *({name: 0} for name in (*COUNTS, "decay_steps")),
    *({name: LARGEST_COUNT + 1} for name in (*COUNTS, "warmup_steps", "save_every", "vocab_size", "block_size")),
    *({name: -1} for name in ("warmup_steps", "save_every", "seed")),
    *({name: -1e-9} for name in ("learning_rate", "min_learning_rate", "weight_decay", "grad_clip", "beta1", "beta2")),
    *({name: 1.0} for name in ("beta1", "beta2", "eval_fraction")),
    {"eval_fraction": -0.1}, {"vocab_size": 256}, {"block_size": 1}, {"seed": LARGEST_SEED + 1},
    {"min_learning_rate": 5.1e-3}, {"mesh": ""}, {"decay_steps": 9, "schedule": "wsd"}, {"mesh": "pp=2,sp=2"},
    {"grad_clip": True}, {"weight_decay": "0"}, {"on_nonfinite": ""}, {"text": "a\0b"}, {"model": "a\0b"},
]  # fmt: skip


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_the_ends_of_each_range_are_accepted(settings, values):
    config = settings(**values)
    assert {name: getattr(config, name) for name in values} == values
    assert sum(config.axes(1).values()) >= 1


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_one_beyond_each_end_is_refused_by_name(settings, values):
    name, value = next(iter(values.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name} (--{name.replace('_', '-')})")) as caught:
        settings(**values).axes(4 if name == "mesh" else 1)
    assert str(value) in str(caught.value) or name in ("text", "model", "mesh", "decay_steps")


def test_every_setting_that_affects_training_is_compared_on_resuming(settings):
    fields = {item.name for item in dataclasses.fields(TrainingConfig)}
    assert fields - settings().settings().keys() == set(NOT_COMPARED)
    assert set(NOT_COMPARED) == {
        "output", "resume", "change", "device", "eval_every", "log_every", "save_every", "keep_checkpoints",
        "on_nonfinite", "checkpoint_format", "async_checkpoint", "activation_checkpointing",
        "activation_checkpointing_every", "reshard_after_forward", "tensorboard", "timeout", "uneven",
    }  # fmt: skip


def test_a_run_without_any_default_does_what_its_settings_say(settings, capsys):
    """A setting that a run takes from its default, and not from its config, shows here."""
    config = settings(
        micro_batch_size=4, steps=7, eval_every=3, log_every=2, save_every=2, keep_checkpoints=3, warmup_steps=1,
        learning_rate=3e-3, min_learning_rate=1e-3, weight_decay=0.3, beta1=0.8, beta2=0.9, grad_clip=0.5, seed=11,
        eval_fraction=0.1, attn_implementation="sdpa", mesh="dp=1", on_nonfinite="skip",
        checkpoint_format="full", optimizer="muon",
    )  # fmt: skip
    defaults = TrainingConfig(text=("a",), output="b")
    same = [name for name in vars(config) if getattr(config, name) == getattr(defaults, name)]
    data = ["dataset", "dataset_split", "task", "chat_template", "packing", "streaming", "shuffle_buffer"]
    data += ["beta", "label_smoothing", "tokenizer", "lora", "quantize"]  # in test_finetuning.py
    layers = ["activation_checkpointing", "activation_checkpointing_every", "compile"]  # in test_activations.py
    assert same == [
        *data, "schedule", "decay_steps", "dtype", *layers, "async_checkpoint", "tensorboard",
        "uneven", "reshard_after_forward", "timeout", "resume", "change",
    ]  # fmt: skip
    result = train(config)
    assert (result.steps, result.interrupted, result.skipped) == (7, False, 0)
    assert sorted(path.name for path in Path(config.output).glob("checkpoint-*")) == [
        "checkpoint-4", "checkpoint-6", "checkpoint-7",
    ]  # fmt: skip
    lines = read_metrics(Path(config.output) / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["learning_rate"] for line in steps] == [learning_rate(step, config) for step in range(7)]
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 7]
    said = capsys.readouterr().out
    assert re.findall(r"^step (\d)/7  loss", said, re.M) == ["2", "4", "6", "7"]
    assert re.findall(r"^step (\d)/7  held-out loss", said, re.M) == ["3", "6", "7"]
    held_out = int(re.search(r"(\d+) held out; 1 process\(es\) as dp=1 on cpu", said)[1])
    trained = int(re.search(r"vocabulary 300; (\d+) blocks of 32 tokens to train on", said)[1])
    assert held_out == round(0.1 * (held_out + trained))
    assert "resuming" not in said and "skipped" not in said

    again = train(dataclasses.replace(config, resume=True))
    assert again.checkpoint == result.checkpoint and again.steps == 7
    said = capsys.readouterr().out
    assert "resuming after step 7" in said and "nothing is left to train" in said


def test_the_optimizer_has_every_setting(settings):
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), frozen)
    config = settings(beta1=0.6, beta2=0.7, weight_decay=0.2, learning_rate=0.25)
    groups = make_optimizer(model, config).param_groups
    assert [(group["betas"], group["lr"], group["weight_decay"], group["fused"]) for group in groups] == [
        ((0.6, 0.7), 0.25, 0.2, True), ((0.6, 0.7), 0.25, 0.0, True),
    ]  # fmt: skip
    assert [len(group["params"]) for group in groups] == [1, 1]
    assert len(make_optimizer(torch.nn.Linear(2, 2, bias=False), config).param_groups) == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model_type": "lama"}, r"unknown architecture 'lama' \(nearest known name: 'llama'\)"),
        ({"model_type": 3}, "unknown architecture 3"),
        ({"model_type": "vit"}, "'vit' has no causal language model"),
    ],
    ids=str,
)
def test_what_is_no_causal_language_model_is_named(model, said):
    with pytest.raises(ValueError, match=rf"model \(--model\): {said}"):
        check_architecture(model)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model \(--model\): .*test_a_folder"):
        check_architecture(str(tmp_path))


def test_a_block_of_exactly_the_positions_is_taken():
    check_positions(SimpleNamespace(max_position_embeddings=16), 16)
    check_positions(SimpleNamespace(), 16)
    with pytest.raises(ValueError, match=r"block_size \(--block-size\) 17 is longer .* max_position_embeddings 16"):
        check_positions(SimpleNamespace(max_position_embeddings=16), 17)


def test_the_memory_that_there_is_may_be_taken_whole(settings):
    each = 10 * (memory.BYTES_A_WEIGHT + memory.STATE_BYTES["adamw"])
    for processes, on_gpu, shards, total in ((1, False, 1, each), (3, False, 1, 3 * each), (3, True, 1, each)):
        held = memory.Held(shards=shards)
        assert "0.00 M parameters" in memory.needed(10, processes, on_gpu, total, held)
        with pytest.raises(ValueError, match="a GPU has" if on_gpu else "this machine has"):
            memory.needed(10, processes, on_gpu, total - 1, held)
    assert "over 2 shards" in memory.needed(10, 2, True, each // 2, memory.Held(shards=2))
    eight = memory.Held(shards=8)
    assert "over 8 shards" in memory.needed(10, 8, True, 40, eight)  # every weight is loaded before it is sharded
    with pytest.raises(ValueError, match="a GPU has"):
        memory.needed(10, 8, True, 39, eight)
    assert memory.needed(10, 1, False, None)


def test_the_memory_counts_experts_adapters_and_the_reference(finetuning, settings):
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "hidden_size": 16, "num_hidden_layers": 2}
    config = build({"model_type": "qwen3_moe", **experts, "num_attention_heads": 2, "num_key_value_heads": 1})
    parameters, of_experts = memory.count_with_experts(config)
    assert of_experts == 2 * 4 * 3 * 8 * 16
    held = memory.held_by(settings(mesh="fsdp=2,ep=2"), 4)
    assert held.bytes_of(parameters, of_experts) == max(16 * (parameters - of_experts / 2) / 2, 4 * parameters)
    assert "over 2 shards, experts over 2" in held.describe(of_experts)
    dpo = memory.held_by(finetuning("dpo"), 1)
    assert dpo.bytes_of(100) == 2000 and "4 of the frozen reference" in dpo.describe()
    lora = memory.held_by(finetuning("sft", lora={"rank": 2}), 1)
    few_bits = memory.held_by(finetuning("dpo", lora={"rank": 2}, quantize="int8"), 1)
    assert (lora.bytes_of(100), few_bits.bytes_of(100)) == (400, 101)


def test_text_that_is_a_folder_or_of_no_end_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"text \(--text\): .* is a folder; name the files in it"):
        read_texts([str(tmp_path)])
    with pytest.raises(ValueError, match="no end-of-text"):
        tokenize(["a"], SimpleNamespace(eos_token_id=None))


def test_blocks_are_held_out_by_share_and_one_is_left_to_train_on():
    assert split_blocks(100, 10, 0.0) == (10, 0)
    assert split_blocks(109, 10, 0.26) == (7, 3)
    assert split_blocks(20, 10, 0.01) == (1, 1)  # at least one, where any is asked for
    assert split_blocks(10, 10, 0.0) == (1, 0)
    for tokens, fraction in ((9, 0.0), (10, 0.5), (20, 0.9)):
        with pytest.raises(ValueError, match=rf"text \(--text\) has {tokens} tokens"):
            split_blocks(tokens, 10, fraction)


def test_the_smoothed_curve_has_no_bias_of_its_start():
    assert [value for _, value in _smoothed([(3, 2.0), (5, 2.0), (9, 2.0)])] == pytest.approx([2.0] * 3)
    points = _smoothed([(1, 1.0), (2, 0.0)])
    assert [step for step, _ in points] == [1, 2]
    assert points[1][1] == pytest.approx(0.9 * 0.1 / 0.19)


class Running:
    """Stands for torchrun."""

    code = 0
    started: tuple = ()

    def __init__(self, command, env):
        type(self).started = (command, env)

    def wait(self):
        return self.code


def test_a_launch_passes_on_settings_threads_and_exit_codes(settings, monkeypatch):
    module = importlib.import_module("easytorch.training.launch")
    monkeypatch.setattr(module.subprocess, "Popen", Running)
    config = settings(seed=7)
    with pytest.raises(ValueError, match=r"processes \(--processes\) must be at least 1, got 0"):
        launch(config, 0)
    with pytest.raises(ValueError, match="does not divide"):
        launch(config, 3)
    assert not Path(config.output).exists() and Running.started == ()
    launch(config, 2, threads=3)
    command, environment = Running.started
    assert "--nproc-per-node=2" in command and environment["OMP_NUM_THREADS"] == "3"
    assert TrainingConfig.from_dict(json.loads(Path(command[-1]).read_text())) == config
    monkeypatch.setattr(Running, "code", 5)
    with pytest.raises(module.TrainingFailedError, match="ended with exit code 5") as caught:
        launch(config, 1)
    assert caught.value.code == 5 and int(Running.started[1]["OMP_NUM_THREADS"]) >= 1
    monkeypatch.setattr(Running, "code", 143)  # of no signal that was passed on
    with pytest.raises(module.TrainingFailedError):
        launch(config, 1)


def test_sums_and_failures_of_processes_are_those_of_all(monkeypatch):
    alone = Processes(0, 1, torch.device("cpu"))
    assert alone.sum(1.5, torch.tensor(2, requires_grad=False)) == [1.5, 2.0] and alone.first
    assert alone.sum(2**24 + 1) == [2**24 + 1]  # in float64
    assert alone.any(True) is True and alone.any(False) is False
    with pytest.raises(KeyError), alone.together():
        raise KeyError("x")
    assert alone.failed
    for marks, wrong_input in (([2.0, 0.0], True), ([1.0, 2.0], False)):
        second = Processes(1, 2, torch.device("cpu"))
        monkeypatch.setattr(second, "sum", lambda *values, marks=marks: marks)
        with pytest.raises(OtherProcessError, match="process 0 of 2 has failed") as caught, second.together():
            pass
        assert caught.value.wrong_input is wrong_input and second.failed and not second.first
