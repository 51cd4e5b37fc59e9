"""docs/bridge.md: its Python runs as it stands, its table lists what `--to` takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from easytorch.bridge.convert import convert
from easytorch.bridge.formats.registry import TARGETS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bridge.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch) -> None:
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained("from-torch")
    convert("from-torch", "gpt2-flax", to="flax")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/bridge.md", "exec"), names)


def test_its_table_lists_every_target() -> None:
    table = PAGE[PAGE.index("| `--to` |") :].partition("\n\n")[0]
    first_column = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(first_column))) == sorted(TARGETS)
