"""Sharded checkpoints of one process: resumed to the bit, refused where damaged, complete or absent after a failure.

Those of several processes, and from mesh to mesh: tests/distributed/test_meshes.py and scripts/check_checkpoints.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import easytorch
from easytorch.bridge.errors import CheckpointError
from easytorch.distributed import shards
from easytorch.training import TrainingConfig, latest_checkpoint, train
from easytorch.training.launch import child_environment

SHARD = "shard-00001-model-00001-of-00001.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainingConfig:
    """A run of four steps, with checkpoints of the second and the fourth, written in the background."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_text("the class binds a name to an object.\n" * 60)
    model = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = TrainingConfig(
        text=(str(folder / "corpus.txt"),), output=str(folder / "run"), vocab_size=270, block_size=8, batch_size=2,
        model={**model, "num_attention_heads": 2, "tie_word_embeddings": True}, steps=4, save_every=2, device="cpu",
        checkpoint_format="sharded", async_checkpoint=True,
    )  # fmt: skip
    train(config)
    return config


@pytest.fixture
def half(trained, tmp_path) -> TrainingConfig:
    """A copy of it as it was after two steps, to be resumed."""
    output = tmp_path / "run"
    shutil.copytree(trained.output, output)
    shutil.rmtree(output / "checkpoint-4")
    return dataclasses.replace(trained, output=str(output), resume=True)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / SHARD)


def test_it_is_resumed_to_the_bit_and_loads_as_a_model(trained, half):
    result = train(half)
    expected = tensors_of(Path(trained.output) / "checkpoint-4")
    found = tensors_of(result.checkpoint)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], one) for name, one in expected.items())
    assert sum(name.startswith("optimizer.exp_avg_sq.") for name in found) == 11, "the head is tied"
    # as a folder of transformers', and the shards themselves, by transformers and by us
    for folder in (Path(half.output) / "model", result.checkpoint):
        for auto in (easytorch.AutoModelForCausalLM, transformers.AutoModelForCausalLM):
            weights = auto.from_pretrained(folder).state_dict()
            assert all(torch.equal(one, expected[name]) for name, one in weights.items()), folder
    assert not (Path(half.output) / "model" / "training_state.json").exists()
    # further, with another kind of checkpoint
    full = dataclasses.replace(half, steps=5, change=("steps",), checkpoint_format="full", async_checkpoint=False)
    assert (train(full).checkpoint / "model.safetensors").is_file()


def rewrite(checkpoint: Path, change) -> None:
    with safe_open(checkpoint / SHARD, "pt") as file:
        metadata = file.metadata()
    tensors = tensors_of(checkpoint)
    change(tensors, info := json.loads(metadata["DCP_SHARDING_INFO"]))
    save_file(tensors, checkpoint / SHARD, metadata={**metadata, "DCP_SHARDING_INFO": json.dumps(info)})


def drop(tensors, info):
    tensors.pop("model.norm.weight"), info.pop("model.norm.weight")


def split(tensors, info):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][8:].clone()
    info["model.norm.weight"] = {"saved_offsets": [8]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, "lacks model.norm.weight"),
        (split, "8 of 16 values of model.norm.weight are there: a shard file is missing"),
        (lambda tensors, _: tensors.update({NORM: torch.ones(17)}), r"shape \(17,\), .* model's is \(16,"),
        (lambda tensors, _: tensors[NORM].fill_(torch.nan), "parameter model.norm.weight has 16 of 16"),
        (lambda tensors, _: tensors[f"optimizer.exp_avg.{NORM}"].fill_(torch.inf), "values that are not finite"),
    ],
)  # fmt: skip
def test_shards_of_something_else_are_refused(half, change, said):
    rewrite(Path(half.output) / "checkpoint-2", change)
    with pytest.raises(CheckpointError, match=rf"checkpoint-2.*{said}.*move .*checkpoint-2 away"):
        train(half)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (SHARD, b"hello"),
        (SHARD, None),
        ("training_state.json", b'{"step'),
        ("training_state.json", b"[1]"),
        ("training_state.json", b'{"step": 2, "optimizer_steps": {"a": "b"}}'),
        ("training_state.json", b'{"step": 3, "optimizer_steps": {}}'),
    ],
)
def test_damaged_files_are_named(half, name, data):
    path = Path(half.output) / "checkpoint-2" / name
    path.write_bytes(path.read_bytes()[:-9] if data is None else data)
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*move .*checkpoint-2 away"):
        train(half)


def test_a_full_disk_in_the_background_ends_the_run_and_leaves_what_was_there(half, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards._Writer, "write_data", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint-4'"):
        train(half)
    assert latest_checkpoint(half.output) == Path(half.output) / "checkpoint-2"
    assert not [path for path in Path(half.output).iterdir() if path.name.startswith(".")]


def test_training_goes_on_while_a_checkpoint_is_written(trained, tmp_path, monkeypatch):
    """The files hold the weights of their step, though later steps have changed them before they are written."""
    from easytorch.training import loop

    stepped = threading.Event()
    write, step = shards._Writer.write_data, loop._Run._train_step

    def late(self, *arguments):
        assert threading.current_thread() is not threading.main_thread()
        assert stepped.wait(60)
        return write(self, *arguments)

    def train_step(self):
        step(self)
        if self.step == 3:
            stepped.set()

    copy = shards._copy_state_dict

    def slow(*arguments):  # so that a step that does not wait for it changes what it copies
        if threading.current_thread() is not threading.main_thread():
            copies.append(time.sleep(0.3))
        return copy(*arguments)

    copies = list[None]()
    monkeypatch.setattr(shards._Writer, "write_data", late)
    monkeypatch.setattr(shards, "_copy_state_dict", slow)
    monkeypatch.setattr(loop._Run, "_train_step", train_step)
    config = dataclasses.replace(trained, output=str(tmp_path / "late"))
    train(config)
    assert len(copies) == 2
    for number in (2, 4):
        found, expected = (tensors_of(Path(one.output) / f"checkpoint-{number}") for one in (config, trained))
        assert all(torch.equal(found[name], one) for name, one in expected.items()), number


KILLED = """
import os, signal, sys
from easytorch.distributed import shards
from easytorch.training import arguments
def kill(*arguments, **more):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(shards._Writer, sys.argv.pop(1), kill)
arguments.run(sys.argv[1:], "train")
"""


@pytest.mark.parametrize("moment", ["write_data", "finish"])
def test_a_kill_during_a_save_leaves_the_checkpoint_before(half, tmp_path, moment, trained):
    (tmp_path / "killed.py").write_text(KILLED)
    half.save(tmp_path / "run.json")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "killed.py"), moment, "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment()}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    output = Path(half.output)
    assert latest_checkpoint(output) == output / "checkpoint-2"
    assert [path for path in output.iterdir() if path.name.startswith(".")], "the killed run leaves its hidden folder"
    found, expected = tensors_of(train(half).checkpoint), tensors_of(Path(trained.output) / "checkpoint-4")
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_settings_that_exclude_each_other_are_refused(trained):
    with pytest.raises(ValueError, match=r"async_checkpoint .* requires checkpoint_format"):
        dataclasses.replace(trained, checkpoint_format="full")
    with pytest.raises(ValueError, match=r"checkpoint_format .* must be one of auto, full, sharded"):
        dataclasses.replace(trained, checkpoint_format="dcp")
