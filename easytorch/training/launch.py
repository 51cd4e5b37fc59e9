"""Start a run under torchrun from a process that is not part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import easytorch
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.prepare import check_inputs


class TrainingFailedError(RuntimeError):
    """The training processes ended with an error, of which they have printed one line; `code` is their exit code."""

    def __init__(self, output: Path, code: int) -> None:
        self.code = code
        super().__init__(f"training in {output} ended with exit code {code}")


def launch(config: TrainingConfig, processes: int, *, threads: int | None = None) -> None:
    """Train as `torchrun --standalone --nproc-per-node processes` does and wait for the end.

    threads: of each process; None shares the cores out evenly. Raises `ValueError` or `OSError` for bad input before
    anything is started, `TrainingFailedError` when a process fails, and `KeyboardInterrupt` when Ctrl-C ended the run,
    after its checkpoint is written.
    """
    if processes < 1:
        raise ValueError(f"{flag('processes')} must be at least 1, got {processes}")
    check_inputs(config, processes)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    config.save(output / "training.json")
    command = [
        sys.executable, "-m", "easytorch.training.torchrun", "--standalone", f"--nproc-per-node={processes}",
        "-m", "easytorch.training", "--config", str(output / "training.json"),
    ]  # fmt: skip
    environment = {**os.environ, **child_environment(), "OMP_NUM_THREADS": str(threads or _share_of_cores(processes))}
    running = subprocess.Popen(command, env=environment)
    try:
        code = running.wait()
    except KeyboardInterrupt:
        # The terminal has sent Ctrl-C to the training processes too; they are writing their checkpoint.
        running.wait()
        raise
    if code:
        raise TrainingFailedError(output, code)


def child_environment() -> dict[str, str]:
    """What a Python child needs to import this very easytorch, installed or not; goes over `os.environ`."""
    paths = [str(Path(easytorch.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _share_of_cores(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)
