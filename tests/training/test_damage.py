"""What can be wrong with a checkpoint, a metrics file, a disk or a model: one error that names it."""

from __future__ import annotations

import dataclasses
import errno
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from easytorch.bridge.errors import CheckpointError
from easytorch.training import TrainingConfig, latest_checkpoint, train
from easytorch.training.checkpoint import STATE, load_state, save_checkpoint
from easytorch.training.disk import named_os_errors
from easytorch.training.metrics import MetricsFile, read_metrics
from easytorch.training.prepare import check_inputs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainingConfig:
    """A run of two steps with a checkpoint of each, to be resumed for a third."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_text("the class binds a name to an object.\n" * 60)
    model = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = TrainingConfig(
        text=(str(folder / "corpus.txt"),), output=str(folder / "run"), model=model, vocab_size=270, block_size=8,
        batch_size=2, steps=2, save_every=1, device="cpu",
    )  # fmt: skip
    train(config)
    return dataclasses.replace(config, resume=True, steps=3, change=("steps",))


@pytest.fixture
def copy(trained, tmp_path) -> TrainingConfig:
    shutil.copytree(trained.output, tmp_path / "run")
    return dataclasses.replace(trained, output=str(tmp_path / "run"))


def damaged(data: bytes, how: str) -> bytes:
    flipped = bytes(byte ^ 0x55 if n % 97 == 0 else byte for n, byte in enumerate(data))
    return {"empty": b"", "half": data[: len(data) // 2], "end": data[:-10], "text": b"hello", "flipped": flipped}[how]


@pytest.mark.parametrize("how", ["empty", "half", "end", "text", "flipped"])
def test_a_damaged_state_is_named(copy, how):
    path = Path(copy.output) / "checkpoint-2" / STATE
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(CheckpointError, match=r"training_state\.pt: is damaged.*move .*checkpoint-2 away"):
        check_inputs(copy, 1)
    shutil.rmtree(path.parent)  # as the message says
    load_state(Path(copy.output) / "checkpoint-1")


def edit(**changes):
    return lambda state: {**state, **changes}


def moments(change):
    def apply(state):
        change(state["optimizer"]["state"])
        return state

    return apply


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: [1], "holds no step"),
        (lambda state: {"step": 2}, "holds no step and optimizer state"),
        (edit(step="x"), "states the step 'x'"),
        (edit(step=1), "states the step 1"),
        (edit(step=True), "states the step True"),
        (edit(settings=[1]), "has settings that are not training settings"),
        (edit(settings={}), "has settings that are not training settings"),
        (edit(optimizer={}), "holds no optimizer state"),
        (edit(optimizer={"state": {}, "param_groups": [1]}), "holds no optimizer state"),
        (edit(optimizer={"state": {}, "param_groups": []}), "for another number of parameters"),
        (moments(lambda of: of.pop(0)), "lacks parameter 0"),
        (edit(without_moments=5), "without moments is 5"),
        (moments(lambda of: of[0].update(exp_avg=torch.zeros(3))), "exp_avg of parameter 0 does not have the shape"),
        (moments(lambda of: of[0].pop("step")), "step of parameter 0 does not have the shape"),
        (moments(lambda of: of[1]["exp_avg_sq"].fill_(torch.nan)), "exp_avg_sq of parameter 1 has values that are not"),
    ],
)
def test_a_state_that_is_of_something_else_is_refused(copy, change, said):
    """torch takes moments of another shape and reads past their end."""
    path = Path(copy.output) / "checkpoint-2" / STATE
    torch.save(change(torch.load(path)), path)
    with pytest.raises(CheckpointError, match=rf"checkpoint-2.*{said}"):
        train(copy)


def test_weights_that_are_not_finite_are_refused(copy):
    path = Path(copy.output) / "checkpoint-2" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name][0] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"the parameter {name} has 16 of"):
        train(copy)


@pytest.mark.parametrize("content", ["", "{"])
def test_a_tokenizer_that_cannot_be_loaded_is_named(copy, content):
    for path in (Path(copy.output) / "checkpoint-2").glob("tokenizer*"):
        path.write_text(content)
    with pytest.raises(ValueError, match="checkpoint-2: no tokenizer can be loaded there"):
        train(copy)


def test_what_only_looks_like_a_checkpoint_is_left_alone(copy):
    output = Path(copy.output)
    (output / "checkpoint-9").write_text("a file")
    (output / "checkpoint-²").mkdir()
    (output / "checkpoint-1").rename(output / "kept")
    (output / "checkpoint-1").symlink_to("kept")
    train(dataclasses.replace(copy, keep_checkpoints=1))
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-9", "checkpoint-²"]
    assert (output / "kept" / STATE).is_file()  # the link goes, not what it leads to


@pytest.mark.parametrize("content", [b"{bad\n", b"{}\n", b"[1]\n", b"\xff\n", b'{"step": "1"}\n'])
def test_metrics_that_are_none_are_named_and_kept(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not the metrics of a step"):
        MetricsFile(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n' + content


def test_resuming_never_shortens_the_metrics_first(tmp_path, monkeypatch):
    """A run killed while it begins again leaves the lines that were there."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("easytorch.training.metrics._line", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, 1)
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]


class Fills:
    """A model or tokenizer whose library meets a full disk."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_pretrained(self, folder):
        if self.error is not None:
            raise self.error


def test_a_full_disk_is_named_whichever_library_meets_it(tmp_path):
    from safetensors import SafetensorError

    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (SafetensorError(said), Exception(said), OSError(errno.ENOSPC, "No space left on device")):
        final = tmp_path / "checkpoint-1"
        with pytest.raises(CheckpointError, match="checkpoint-1: cannot be written: No space left on device"):
            save_checkpoint(final, 1, Fills(error), Fills(), {"optimizer": {}}, 1)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), named_os_errors(tmp_path):
        _ = 1 / 0


@pytest.mark.parametrize("kilobytes", [2, 30, 90])
def test_a_disk_that_fills_while_torch_writes_leaves_nothing(tmp_path, kilobytes):
    """The limit on a file's size stands for the disk; torch fails in its writer, and again while it cleans up."""
    state = {"optimizer": {n: torch.zeros(1000) for n in range(25)}}
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, former[1]))
    try:
        with pytest.raises(CheckpointError, match="checkpoint-1: cannot be written: File too large"):
            save_checkpoint(tmp_path / "checkpoint-1", 1, Fills(), Fills(), state, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert latest_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_model_that_sees_what_it_is_to_predict_is_refused(trained, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = {"model_type": "bert", **sizes}
    config = dataclasses.replace(
        trained, output=str(tmp_path / "o"), model=bert, resume=False, change=(), steps=1, save_every=0
    )
    with pytest.raises(ValueError, match="BertLMHeadModel sees the tokens that it is to predict"):
        train(config)
    assert not (tmp_path / "o").exists()
    train(dataclasses.replace(config, model={**bert, "is_decoder": True}))


def test_too_little_text_leaves_nothing(trained, tmp_path):
    config = dataclasses.replace(trained, output=str(tmp_path / "o"), resume=False, change=(), block_size=10_000)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        train(config)
    assert not (tmp_path / "o").exists()


def test_a_file_in_the_way_of_the_output_is_named(trained, tmp_path):
    (tmp_path / "file").write_text("x")
    for output in ("file", "file/inside"):
        with pytest.raises(NotADirectoryError, match=r"output \(--output\).*file is a file"):
            check_inputs(dataclasses.replace(trained, output=str(tmp_path / output)), 1)
