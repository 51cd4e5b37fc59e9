"""Models over meshes of four virtual devices by torch_xla's SPMD, which a process cannot leave again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> None:
    environment = {**os.environ, "CPU_NUM_DEVICES": "4", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")


def test_losses_equal_the_cpus_and_a_step_is_one_program():
    run("spmd_losses.py")


def test_steps_of_further_blocks_equal_the_cpus():
    run("spmd_blocks.py", "latent", "recurrent", "encoder-decoder")  # "delta" compiles for long


def test_models_load_over_a_mesh_and_are_saved(tmp_path):
    run("spmd_loading.py", str(tmp_path))


def test_runs_of_the_trainer(tmp_path):
    run("spmd_training.py", str(tmp_path))
