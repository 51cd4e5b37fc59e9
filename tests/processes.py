"""How the tests start several processes, and how each of them ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(script: Path, *arguments: object, processes: int, timeout: float) -> subprocess.CompletedProcess[str]:
    """`torchrun` of a script, with a thread in each of its processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*torchrun, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def leave_group() -> NoReturn:
    """Leave the group and end with 0, without taking the interpreter down.

    A device mesh keeps its groups, and so gloo's threads, alive past `destroy_process_group`. A thread that lets go of
    a tensor while Python shuts down aborts the process ("terminate called without an active exception"): seen in one
    of some hundred runs on a loaded machine, torch 2.13.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
