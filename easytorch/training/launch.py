"""Start a run under torchrun from a process that is not part of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import easytorch
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.output_lock import only_run
from easytorch.training.prepare import check_inputs

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TrainingFailedError(RuntimeError):
    """The training processes ended with an error, of which they have printed one line; `code` is their exit code."""

    def __init__(self, output: Path, code: int) -> None:
        self.code = code
        super().__init__(f"training in {output} ended with exit code {code}")


def launch(config: TrainingConfig, processes: int, *, threads: int | None = None) -> None:
    """Train as `torchrun --standalone --nproc-per-node processes` does and wait for the end.

    threads: of each process; None shares the cores out evenly. Raises `ValueError` or `OSError` for bad input before
    anything is started, `TrainingFailedError` when a process fails, and `KeyboardInterrupt` when Ctrl-C, SIGTERM or
    SIGHUP ended the run, after its checkpoint is written.
    """
    if processes < 1:
        raise ValueError(f"{flag('processes')} must be at least 1, got {processes}")
    if config.device == "xla":
        _train_here(config, processes)
        return
    check_inputs(config, processes)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    settings = output / "training.json"
    with ExitStack() as held:
        with only_run(output):  # which the run itself takes, once it has read its settings
            settings.touch()
            held.enter_context(only_run(output, settings))
            config.save(settings)
        command = [
            sys.executable, "-m", "easytorch.training.torchrun", "--standalone", f"--nproc-per-node={processes}",
            "-m", "easytorch.training", "--config", str(settings),
        ]  # fmt: skip
        own = {"OMP_NUM_THREADS": str(threads or _share_of_cores(processes))}
        running = subprocess.Popen(command, env={**os.environ, **child_environment(), **own})
        with _signals_passed_on(running) as asked:
            code = running.wait()
    if asked and code in (0, *(128 + number for number in STOPPING)):
        raise KeyboardInterrupt
    if code:
        raise TrainingFailedError(output, code)


def _train_here(config: TrainingConfig, processes: int) -> None:
    """One process has all devices of torch_xla, and this one may hold them already: there is none to start."""
    if processes > 1:
        raise ValueError(
            f"{flag('processes')} {processes}: with {flag('device')} xla one process trains on all devices"
        )
    from easytorch.training.loop import train

    if train(config).interrupted:
        raise KeyboardInterrupt


@contextmanager
def _signals_passed_on(running: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forwards signals to the child process, which writes a checkpoint before it ends; yields the received numbers.
    A terminal sends Ctrl-C to both, and torchrun does not shut down cleanly when it gets two."""
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or asked:
            running.send_signal(signal.SIGTERM)
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield asked
        return
    names = [name for name in STOPPING if signal.getsignal(name) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    former = {name: signal.signal(name, pass_on) for name in names}
    try:
        yield asked
    finally:
        for name, handler in former.items():
            signal.signal(name, handler)


def child_environment() -> dict[str, str]:
    """The environment for a Python child to import this easytorch, installed or not; updates `os.environ`."""
    paths = [str(Path(easytorch.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _share_of_cores(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)
