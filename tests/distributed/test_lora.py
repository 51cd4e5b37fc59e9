"""Joint products of projections with adapters, over meshes of two processes (`lora_rank.py`)."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_ranks


def test_losses_and_gradients_are_those_of_one_process() -> None:
    done = run_ranks(Path(__file__).with_name("lora_rank.py"), processes=2, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == 2, done.stdout
