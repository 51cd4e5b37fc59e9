"""`accelerate launch` and transformers' Trainer over two processes (`accelerate_rank.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import easytorch
from tests.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def test_trainer_and_accelerate_over_two_processes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = FAMILIES["llama"].config(vocab_size=96)
    easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    # accelerate's launcher of several processes here; each of them says that it is to stay on the CPU
    more = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, *more, str(Path(__file__).with_name("accelerate_rank.py")), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == 2, done.stdout
