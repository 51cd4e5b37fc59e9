"""Decoding with the native Llama against transformers' own: milliseconds a token, both in turns in one process.

    python scripts/bench_decode.py                    # 0.44 B weights in bfloat16, batch 1
    python scripts/bench_decode.py --overhead         # the share of a token of ours that is not arithmetic

Every round decodes the same tokens with one model and then with the other, first by turns; the figures are medians over
the rounds, and the ratio is that of the pairs, which other load on the machine disturbs less.

The overhead is at most a token of `generate` with as many layers whose weights are too small to count, over a token of
`generate` with the model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import easytorch
from easytorch.kernels.decoder_step import cpu

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
# The smallest whose products the operators of the large model take, in float32 too.
TINY = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true", help="ours against ours with tiny widths at the same depth")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--attention", default=None, help="attn_implementation of the native model")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.overhead:
        models = {"easytorch": native(SIZES, dtype, options.attention), "tiny": native(TINY, dtype, options.attention)}
        cpu.SMALLEST_FLOAT32 = 1  # or tiny weights in float32 would be the modules'
    else:
        models = pair(dtype, options.attention)
    ids = torch.randint(2, 100, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    timed = generated if options.overhead else decode
    with torch.inference_mode():
        for model in models.values():
            timed(model, ids, 2)
        for round_ in range(options.rounds):
            names = list(models)[:: 1 if round_ % 2 else -1]
            for name in names:
                times[name].append(timed(models[name], ids, options.tokens))
    weights = sum(weight.numel() for weight in models["easytorch"].parameters())
    threads = torch.get_num_threads()
    print(f"{weights / 1e9:.2f} B weights, {options.dtype}, torch {torch.__version__}, {threads} threads")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:12} {1e3 * middle:8.2f} ms a token  {1 / middle:7.1f} tokens/s")
    first, second = ("tiny", "easytorch") if options.overhead else ("easytorch", "transformers")
    ratio = statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))
    print(f"{first} / {second}, median of {options.rounds} pairs: {ratio:.3f}")


def config_of(sizes: dict[str, int]) -> LlamaConfig:
    return LlamaConfig(**sizes, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8, eos_token_id=None)


def native(sizes: dict[str, int], dtype: torch.dtype, attention: str | None) -> torch.nn.Module:
    chosen = {} if attention is None else {"attn_implementation": attention}
    return easytorch.AutoModelForCausalLM.from_config(config_of(sizes), dtype=dtype, **chosen).eval()


def pair(dtype: torch.dtype, attention: str | None) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config_of(SIZES), dtype=dtype).eval()
    ours = native(SIZES, dtype, attention)
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


def generated(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> float:
    """Seconds per token of `generate`, after the prompt and the first tokens."""
    seconds = []
    for count in (2, 2 + tokens):
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)  # no token ends it
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / tokens


if __name__ == "__main__":
    main()
