"""Recurrent and latent layers against transformers' own classes with the same weights, in one run.

    python scripts/bench_recurrent.py [--threads 2] [--rounds 5] [--dtype float32] [CASE ...]

Cases: mamba2 and mamba (prefill of 4096 tokens), qwen3_5 (the same, one layer of Gated DeltaNet and one of
attention), deepseek (one token after 4096, layers without experts); scans, the operations alone against transformers'
functions, of 4096 tokens and of one. Both take turns; a ratio is the median of the ratios within a round. Nothing else
should run: the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import copy
import functools
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
from easytorch.operations import OperationRegistry

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
    """Four decoding steps after the prompt."""
    cache = model(ids, logits_to_keep=1).past_key_values

    def run() -> None:
        for _ in range(4):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-4)

    return run


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """The median seconds of both, and the median of the ratios within a round."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for way, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            way()
            if number:  # the first round warms up
                taken.append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), ratio


def mamba2_scan(length: int, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    heads, width, state = 24, 64, 128
    x, dt = torch.randn(1, length, heads, width).to(dtype), torch.randn(1, length, heads).to(dtype)
    B, C = (torch.randn(1, length, 1, state).to(dtype) for _ in "BC")
    A, D, bias = -torch.arange(1.0, heads + 1), torch.randn(heads).to(dtype), torch.randn(heads).to(dtype)
    options: dict[str, Any] = {"dt_bias": bias, "dt_softplus": True}
    first = torch.zeros(1, heads, width, state)
    ours = OperationRegistry.create("ssm2")
    if length > 1:
        scan = functools.partial(theirs.mamba2_chunk_scan, chunk_size=256, return_final_states=True)
        return lambda: ours(x, dt, A, B, C, D=D, **options), lambda: scan(x, dt, A, B, C, D=D, **options)
    size = (heads, width)  # theirs takes a number of each head for each of its channels
    steps, rates = dt[:, 0, :, None].expand(1, *size), A[:, None, None].expand(*size, state)
    per_channel = {"D": D[:, None].expand(size), "dt_bias": bias[:, None].expand(size), "dt_softplus": True}
    return (
        lambda: ours(x, dt, A, B, C, D=D, initial_state=first, **options),
        lambda: theirs.mamba2_selective_state_update(first, x[:, 0], steps, rates, B[:, 0], C[:, 0], **per_channel),
    )


def delta_scan(length: int, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    query, key = (torch.randn(1, length, 8, 128).to(dtype) for _ in "qk")
    value, g = torch.randn(1, length, 16, 128).to(dtype), -torch.rand(1, length, 16)
    beta, first = torch.rand(1, length, 16).to(dtype), torch.zeros(1, 16, 128, 128)
    ours = OperationRegistry.create("gated_delta_rule")
    function = theirs.torch_chunk_gated_delta_rule if length > 1 else theirs.torch_recurrent_gated_delta_rule
    options: dict[str, Any] = {"initial_state": first, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return (
        lambda: ours(query, key, value, g, beta, initial_state=first, use_qk_l2norm=True),
        lambda: function(query, key, value, g, beta, **options),
    )


def mamba_scan(length: int, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Theirs without the operations around it: (B, C, T)."""
    from transformers.models.mamba import modeling_mamba as theirs

    channels, state = 1536, 16
    x, dt, z = (torch.randn(1, length, channels).to(dtype) for _ in "xdz")
    B, C = (torch.randn(1, length, state).to(dtype) for _ in "BC")
    A, D, bias = -torch.rand(channels, state), torch.randn(channels).to(dtype), torch.randn(channels).to(dtype)
    ours, first = OperationRegistry.create("ssm1"), torch.zeros(1, channels, state)
    if length > 1:
        turned = [tensor.transpose(1, 2) for tensor in (x, dt, B, C)]
        return (
            lambda: ours(x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True),
            lambda: theirs.mamba_selective_scan(
                *turned[:2], A, *turned[2:], D=D, z=z.transpose(1, 2), delta_bias=bias, delta_softplus=True,
                return_last_state=True,
            ),
        )  # fmt: skip
    return (
        lambda: ours(x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True, initial_state=first),
        lambda: theirs.mamba_selective_state_update(
            first, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D=D, z=z[:, 0], dt_bias=bias, dt_softplus=True
        ),
    )


SCANS = {"mamba2": mamba2_scan, "gated delta": delta_scan, "mamba": mamba_scan}


def measure_scans(dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, ways in SCANS.items():
            for length in (LENGTH, 1):
                calls = 1 if length > 1 else 100
                ours, theirs, ratio = in_turns(
                    *(functools.partial(repeat, way, calls) for way in ways(length, dtype)), rounds
                )
                seconds = f"ours {ours / calls * 1e3:.3f} ms, transformers {theirs / calls * 1e3:.3f} ms"
                print(f"{name} scan of {length}, {dtype}: {seconds}, ratio {ratio:.3f} load {os.getloadavg()[0]:.1f}")


def repeat(way: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        way()


def measure(name: str, dtype: torch.dtype, rounds: int) -> str:
    config = CASES[name]()
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    ours = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(3, 1000, (1, LENGTH))
    with torch.no_grad():
        ways = [(decode if name == "deepseek" else prefill)(model, ids) for model in (ours, theirs)]
        seconds = in_turns(*ways, rounds)
    return f"{name:10} {dtype} ours {seconds[0]:.3f} s, transformers {seconds[1]:.3f} s, ratio {seconds[2]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*CASES, "scans")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(every)):
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(every)}")
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    for name in arguments.cases or every:
        if name == "scans":
            measure_scans(dtype, arguments.rounds)
        else:
            print(measure(name, dtype, arguments.rounds), f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
