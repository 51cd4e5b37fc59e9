"""Checkpoints loaded over a mesh of two processes (`loading_rank.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import easytorch
from easytorch.bridge.convert import convert
from tests.models.families import FAMILIES
from tests.processes import run_ranks


def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for family in ("llama", "qwen3_moe"):
        config = FAMILIES[family].config(vocab_size=97 if family == "qwen3_moe" else 96)
        easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    convert(tmp_path / "llama", tmp_path / "flax", to="flax")
    convert(tmp_path / "llama", tmp_path / "orbax", to="orbax")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OlmoConfig(vocab_size=96, eos_token_id=1, pad_token_id=0, **sizes)
    transformers.OlmoForCausalLM(config).save_pretrained(tmp_path / "olmo")
    done = run_ranks(Path(__file__).with_name("loading_rank.py"), tmp_path, processes=2, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == 2, done.stdout
