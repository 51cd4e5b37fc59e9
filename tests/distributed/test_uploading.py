"""A model over a mesh of two processes is written by both and uploaded by the first (`uploading_rank.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import easytorch
from tests.distributed.uploading_rank import SIZE
from tests.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def test_all_ranks_write_and_the_first_uploads(tmp_path: Path) -> None:
    """The ranks each made a repository and uploaded a folder of their own."""
    easytorch.AutoModelForCausalLM.from_config(FAMILIES["llama"].config()).save_pretrained(tmp_path / "alone")
    model = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    model.save_pretrained(tmp_path / "split", max_shard_size=SIZE)
    model.save_pretrained(tmp_path / "expected")
    model.save_pretrained(tmp_path / "expected", variant="fp16", max_shard_size="30KB")
    easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / "alone", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "half", max_shard_size=SIZE
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).with_name("uploading_rank.py")), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.count(" ok\n") == 2, done.stdout + done.stderr[-6000:]
    one, both = tmp_path / "expected", tmp_path / "variant"
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in both.iterdir())
    assert all(path.read_bytes() == (both / path.name).read_bytes() for path in one.iterdir())
