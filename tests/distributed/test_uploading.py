"""A model over a mesh of two processes is written by both and uploaded by the first (`uploading_rank.py`)."""

from __future__ import annotations

from pathlib import Path

import torch

import easytorch
from tests.distributed.uploading_rank import SIZE
from tests.models.families import FAMILIES
from tests.processes import run_ranks


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
    done = run_ranks(Path(__file__).with_name("uploading_rank.py"), tmp_path, processes=2, timeout=300)
    assert done.stdout.count(" ok\n") == 2, done.stdout + done.stderr[-6000:]
    one, both = tmp_path / "expected", tmp_path / "variant"
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in both.iterdir())
    assert all(path.read_bytes() == (both / path.name).read_bytes() for path in one.iterdir())
