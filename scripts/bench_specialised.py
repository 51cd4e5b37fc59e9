"""transformers' own classes as they are, with our attention, and with all that is replaced in them.

    python scripts/bench_specialised.py                                    every case, one thread
    python scripts/bench_specialised.py apertus --dtype bfloat16 --json figures.json

One process; the three take turns with the same weights, and a ratio is the median of those of single rounds: ours over
transformers' default. 4 layers, hidden size 1024: a prompt, and 8 tokens one by one behind it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

import easytorch

COMMON = {
    "vocab_size": 2000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 704, "num_experts": 16, "num_experts_per_tok": 4}
# Types without a native class: what is recognised in them differs.
CASES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "vaultgemma": {"query_pre_attn_scalar": 64, "sliding_window": 64},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 704, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 4, "intermediate_size": 704},
    "flex_olmo": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 704},
}
WAYS = ("transformers", "attention", "specialised")


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    return lambda: model(ids, logits_to_keep=1)


def decode(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    cache = model(ids, logits_to_keep=1).past_key_values

    def run() -> None:
        for _ in range(8):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-8)

    return run


def train(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()

    return run


def models(name: str, dtype: torch.dtype) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[name](**{**COMMON, **CASES[name]})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).save_pretrained(folder)
        load = easytorch.AutoModelForCausalLM.from_pretrained
        return {
            "transformers": transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(),
            "attention": load(folder, dtype=dtype, specialise=False).eval(),
            "specialised": load(folder, dtype=dtype).eval(),
        }


def measure(name: str, dtype: torch.dtype, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """For each workload the seconds of transformers' modules, and the ratios of the others."""
    made = models(name, dtype)
    ids = torch.randint(3, 2000, (1, tokens))
    figures: dict[str, dict[str, float]] = {}
    for label, action in (("prefill", prefill), ("decode", decode), ("train", train)):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        with torch.no_grad():
            runs = {way: action(made[way], ids) for way in WAYS}
            for number in range(rounds + 1):
                for way in WAYS:
                    start = time.process_time()
                    runs[way]()
                    if number:  # the first round warms up
                        times[way].append(time.process_time() - start)
        base = times["transformers"]
        figures[label] = {"seconds": statistics.median(base)} | {
            way: statistics.median(a / b for a, b in zip(times[way], base, strict=True)) for way in WAYS[1:]
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--threads", type=int, default=1, help="times are of the processor, so one is what is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of the prompt")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(CASES)}")
    torch.set_num_threads(arguments.threads)
    figures = {}
    for name in arguments.cases or CASES:
        figures[name] = measure(name, getattr(torch, arguments.dtype), arguments.rounds, arguments.tokens)
        for label, one in figures[name].items():
            print(
                f"{name:18} {arguments.dtype} {label:8} transformers {one['seconds']:.3f} s, ratio with our attention "
                f"{one['attention']:.2f}, specialised {one['specialised']:.2f}, load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
