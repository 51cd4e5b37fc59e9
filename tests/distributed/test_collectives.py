"""FSDP2's collectives over gloo (`collectives_rank.py`), in three processes."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_ranks


def test_they_give_what_gloo_gives() -> None:
    done = run_ranks(Path(__file__).with_name("collectives_rank.py"), processes=3, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == 3, done.stdout
