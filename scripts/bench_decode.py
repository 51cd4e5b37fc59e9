"""Decoding with the native Llama against transformers' own: milliseconds a token, both in turns in one process.

    python scripts/bench_decode.py                    # 0.44 B weights in bfloat16, batch 1
    python scripts/bench_decode.py --overhead         # the same depth with tiny widths: what is not arithmetic

Every round decodes the same tokens with one model and then with the other, first by turns; the figures are medians over
the rounds, and the ratio is that of the pairs, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import easytorch

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true", help="tiny widths at the same depth")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--attention", default=None, help="attn_implementation of the native model")
    options = parser.parse_args()
    models = pair(TINY if options.overhead else SIZES, getattr(torch, options.dtype), options.attention)
    ids = torch.randint(2, 100, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            decode(model, ids, 2)
        for round_ in range(options.rounds):
            names = list(models)[:: 1 if round_ % 2 else -1]
            for name in names:
                times[name].append(decode(models[name], ids, options.tokens))
    weights = sum(weight.numel() for weight in models["easytorch"].parameters())
    threads = torch.get_num_threads()
    print(f"{weights / 1e9:.2f} B weights, {options.dtype}, torch {torch.__version__}, {threads} threads")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:12} {1e3 * middle:8.2f} ms a token  {1 / middle:7.1f} tokens/s")
    ratio = statistics.median(a / b for a, b in zip(times["easytorch"], times["transformers"], strict=True))
    print(f"easytorch / transformers, median of {options.rounds} pairs: {ratio:.3f}")


def pair(sizes: dict[str, int], dtype: torch.dtype, attention: str | None) -> dict[str, torch.nn.Module]:
    config = LlamaConfig(**sizes, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    chosen = {} if attention is None else {"attn_implementation": attention}
    ours = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **chosen).eval()
    ours.load_state_dict(theirs.state_dict())
    return {"easytorch": ours, "transformers": theirs}


def decode(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> float:
    """Seconds per token, after the prompt."""
    cache = DynamicCache(config=model.config)
    token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(tokens):
        token = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - start) / tokens


if __name__ == "__main__":
    main()
