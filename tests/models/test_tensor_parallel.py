"""Native models under transformers' tensor and expert parallelism, in two real processes."""

from __future__ import annotations

from pathlib import Path

import torch

import easytorch
from tests.models.families import FAMILIES
from tests.processes import run_ranks


def test_two_processes_compute_what_one_computes(llama_config, tmp_path) -> None:
    """Tied weights too: their embedding is sharded as the head is, or the forward fails."""
    torch.manual_seed(0)
    configs = [llama_config(vocab_size=96, tie_word_embeddings=tied) for tied in (True, False)]
    configs.append(FAMILIES["mixtral"].config(vocab_size=96))
    for number, config in enumerate(configs):
        easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(number))
    cases = [f"{plan}:{tmp_path}/{number}" for plan, number in (("tp", 0), ("tp", 1), ("tp", 2), ("ep", 2))]
    for number, family in enumerate(("llama", "qwen3"), start=len(configs)):
        torch.manual_seed(number)
        config = FAMILIES[family].config(vocab_size=96, num_hidden_layers=2, tie_word_embeddings=family == "qwen3")
        easytorch.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(number))
        cases.append(f"outside:{tmp_path}/{number}")
    done = run_ranks(Path(__file__).with_name("tensor_parallel_rank.py"), *cases, processes=2, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal ") == 2 * len(cases)
