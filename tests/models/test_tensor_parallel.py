"""Native Llama under transformers' tensor parallelism, in two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import easytorch

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_compute_what_one_computes(llama_config, tmp_path) -> None:
    """Tied weights too: their embedding is sharded as the head is, or the forward fails."""
    torch.manual_seed(0)
    folders = []
    for tied in (True, False):
        folders.append(tmp_path / f"tied-{tied}")
        config = llama_config(vocab_size=96, tie_word_embeddings=tied)
        easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(folders[-1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).with_name("tensor_parallel_rank.py")), *map(str, folders)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal ") == 4
