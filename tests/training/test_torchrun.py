"""Real torchrun processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easytorch.training import latest_checkpoint, launch, train
from easytorch.training.checkpoint import load_state
from easytorch.training.launch import child_environment
from easytorch.training.metrics import read_metrics

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def series(output, key):
    return [line[key] for line in read_metrics(Path(output) / "metrics.jsonl") if key in line]


def test_two_processes_learn_what_one_learns(settings, partly_unused):
    one, two = settings("one", model=partly_unused), settings("two", model=partly_unused, micro_batch_size=2)
    train(one)
    launch(two, 2, threads=1)
    assert series(two.output, "loss") == pytest.approx(series(one.output, "loss"), rel=1e-4)
    assert series(two.output, "eval_loss") == pytest.approx(series(one.output, "eval_loss"), rel=1e-4)
    assert series(two.output, "gradient_norm") == pytest.approx(series(one.output, "gradient_norm"), rel=1e-3)
    assert (Path(two.output) / "checkpoint-10" / "model.safetensors").is_file()


def test_the_script_runs_under_plain_torchrun(settings, tmp_path):
    config = settings(steps=2, eval_fraction=0.001)  # one block is held out: one of the two processes has none
    config.save(tmp_path / "run.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), "--config", str(tmp_path / "run.json"), "--steps", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    assert done.stdout.count("parameters;") == 1  # only the first process speaks
    assert len(series(config.output, "loss")) == 3
    assert "1 held out" in done.stdout and 0 < series(config.output, "eval_loss")[0] < 10


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the threads of a process from /proc")
@pytest.mark.parametrize("mesh", [None, "fsdp=2"])
def test_no_communication_thread_outlives_the_run(settings, tmp_path, mesh):
    """One that did could drop a tensor while Python shuts down, which aborts a process that had done its work."""
    config = settings(steps=2, mesh=mesh)
    config.save(tmp_path / "run.json")
    (tmp_path / "rank.py").write_text(
        "import json, pathlib, sys\n"
        "from easytorch.training import TrainingConfig, train\n"
        "train(TrainingConfig.from_dict(json.loads(pathlib.Path(sys.argv[1]).read_text())))\n"
        "tasks = pathlib.Path('/proc/self/task').iterdir()\n"
        "print('left:', [name for task in tasks if 'gloo' in (name := (task / 'comm').read_text().strip())])\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "rank.py"), str(tmp_path / "run.json")],
        env={**os.environ, **child_environment()}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left: []") == 2, done.stdout


def test_ctrl_c_ends_the_command_with_a_checkpoint_to_resume_from(settings, tmp_path):
    config = settings(steps=100_000, eval_fraction=0.0)
    config.save(tmp_path / "run.json")
    metrics = Path(config.output) / "metrics.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "easytorch", "train", "--processes", "2", "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment()}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whatever this process was started with
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while not (metrics.exists() and metrics.stat().st_size):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        assert running.wait(600) == 130
    finally:
        running.kill()
    checkpoint = latest_checkpoint(config.output)
    assert checkpoint is not None
    assert load_state(checkpoint)["step"] == len(series(config.output, "loss")) < 100_000


def test_sigterm_to_the_command_alone_ends_the_training_processes_with_a_checkpoint(settings, tmp_path):
    """As systemd, docker and kill do. One process: torchrun starts it as it starts several."""
    config = settings(steps=100_000, eval_fraction=0.0)
    config.save(tmp_path / "run.json")
    metrics = Path(config.output) / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "easytorch", "train", "--processes", "1", "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment()}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        deadline = time.monotonic() + 600
        while not (metrics.exists() and metrics.stat().st_size):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        running.terminate()
        said = running.communicate(timeout=600)  # ends when no process holds the pipes any more
    assert running.returncode == 130 and "can be resumed" in said[0], said
    assert latest_checkpoint(config.output) is not None


FULL_DISK = """
import errno, os, sys
from easytorch.training import arguments, loop
original, rank = loop._Run._loss, int(os.environ["RANK"])
def loss(self, module, tokens):
    if self.step == 2 and rank == int(os.environ["FAILING"]):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    return original(self, module, tokens)
loop._Run._loss = loss
sys.exit(arguments.run(sys.argv[1:], "train"))
"""


@pytest.mark.parametrize(("mesh", "failing"), [(None, 0), ("pp=2", 1)])
def test_one_process_fails_and_only_its_failure_is_told(settings, tmp_path, mesh, failing):
    """Of a pipeline the last stage, whose error torch wraps into one of its own with all arguments."""
    (tmp_path / "rank.py").write_text(FULL_DISK)
    config = settings(steps=4, eval_fraction=0.0, mesh=mesh)
    config.save(tmp_path / "run.json")
    torchrun = ["-m", "easytorch.training.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "rank.py"), "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment(), "FAILING": str(failing)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device: 'metrics.jsonl'\n")


HANGS = """
import os, signal, sys
from easytorch.training import arguments, loop
original = loop._Run._loss
def loss(self, module, tokens):
    if self.step == 1 and os.environ["RANK"] == "1":
        signal.pause()  # which torchrun ends
        os._exit(1)
    return original(self, module, tokens)
loop._Run._loss = loss
sys.exit(arguments.run(sys.argv[1:], "train"))
"""


@pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2"])
def test_a_process_that_hangs_is_named_with_its_step(settings, tmp_path, mesh):
    """Stages of pp wait for messages, whose limit gloo takes when a group is made."""
    (tmp_path / "rank.py").write_text(HANGS)
    config = settings(steps=4, eval_fraction=0.0, timeout=20, mesh=mesh)
    config.save(tmp_path / "run.json")
    torchrun = ["-m", "easytorch.training.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "rank.py"), "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    said = "error: process 1 of 2 has not answered for 20 seconds (timeout (--timeout)), in step 2: it hangs"
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1, done.stderr


def test_bad_input_is_refused_before_anything_starts(settings, tmp_path):
    with pytest.raises(ValueError, match="does not divide"):
        launch(settings(batch_size=3), 2)
    with pytest.raises(FileNotFoundError, match="absent"):
        launch(settings(text=(str(tmp_path / "absent.txt"),)), 2)
    for model, message in [
        ({"model_type": "lama"}, "unknown architecture 'lama' .nearest known name: 'llama'"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": 15, "num_attention_heads": 2}, "attention heads"),
        ({"model_type": "llama", "hiden_size": 32}, "has no setting 'hiden_size' .nearest known name: 'hidden_size'"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"model_type": "vit"}, "'vit' has no causal language model"),
    ]:
        with pytest.raises(ValueError, match=rf"--model\): .*{message}"):
            launch(settings(model=model), 2)
    with pytest.raises(OSError, match="absent"):
        launch(settings(model=str(tmp_path / "absent")), 2)
    assert not (tmp_path / "run").exists()


def command(config, tmp_path, *arguments):
    """`easytorch train --processes 2` with these settings."""
    config.save(tmp_path / "run.json")
    return subprocess.run(
        [sys.executable, "-m", "easytorch", "train", "--processes", "2", "--config", str(tmp_path / "run.json")],
        env={**os.environ, **child_environment()}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_loss_that_is_not_finite_is_one_line_of_all_processes(settings, tmp_path):
    config = settings(learning_rate=1e30, warmup_steps=0, save_every=1, keep_checkpoints=1)
    done = command(config, tmp_path)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert (done.stderr.startswith("error: step 1: ") and "not finite" in done.stderr) or "nan" in done.stderr
    assert latest_checkpoint(config.output) is None


def test_what_the_first_process_finds_wrong_is_one_line_of_all_processes(settings, tmp_path):
    done = command(settings(block_size=100_000), tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "nothing is left to train on" in done.stderr, done.stderr


def test_a_process_that_is_killed_is_named(tmp_path):
    (tmp_path / "rank.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run(
        [sys.executable, "-m", "easytorch.training.torchrun", "--standalone", str(tmp_path / "rank.py")],
        env={**os.environ, **child_environment()}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (137, "error: training process 0 was ended by SIGKILL: out of memory?\n")


def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "easytorch.training", "--text", "x", "--output", str(tmp_path / "o"), "--steps", "0"],
        env={**os.environ, **child_environment()}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: steps (--steps) must be at least 1, got 0\n")
