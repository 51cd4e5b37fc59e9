"""Recurrent and latent layers against transformers' own classes with the same weights, in one run.

    python scripts/bench_recurrent.py [--threads 2] [--rounds 5] [--dtype float32] [CASE ...]

Cases: mamba2 and mamba (prefill of 4096 tokens), qwen3_5 (the same, one layer of Gated DeltaNet and one of
attention), deepseek (one token after 4096, layers without experts). Both classes take turns; a ratio is the median of
the ratios within a round. Nothing else should run: the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

import easytorch

LENGTH = 4096
_COMMON = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEEPSEEK = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "first_k_dense_replace": 4,
    "max_position_embeddings": 2 * LENGTH,
}
_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}

# name -> config, and the layers it has
CASES: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: transformers.Mamba2Config(
        **_COMMON, hidden_size=768, num_heads=24, n_groups=1, num_hidden_layers=2
    ),
    "mamba": lambda: transformers.MambaConfig(**_COMMON, hidden_size=768, num_hidden_layers=1),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **_COMMON, **_QWEN, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(**_COMMON, **_DEEPSEEK, num_hidden_layers=4),
}


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    return lambda: model(ids, logits_to_keep=1)


def decode(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """Four tokens, one by one, after the others."""
    cache = model(ids, logits_to_keep=1).past_key_values

    def run() -> None:
        for _ in range(4):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-4)

    return run


def measure(name: str, dtype: torch.dtype, rounds: int) -> str:
    config = CASES[name]()
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    ours = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(3, 1000, (1, LENGTH))
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        ways = [(decode if name == "deepseek" else prefill)(model, ids) for model in (ours, theirs)]
        for number in range(rounds + 1):
            for way, taken in zip(ways, times, strict=True):
                start = time.perf_counter()
                way()
                if number:  # the first round warms up
                    taken.append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    seconds = [statistics.median(taken) for taken in times]
    return f"{name:10} {dtype} ours {seconds[0]:.3f} s, transformers {seconds[1]:.3f} s, ratio {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=list(CASES), metavar="CASE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.cases:
        print(measure(name, getattr(torch, arguments.dtype), arguments.rounds), f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
