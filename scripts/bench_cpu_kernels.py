"""The C++ kernels against torch's own implementations: products of few rows, attention of one query and over pages,
norms, rotary, gated units, and full decoding.

    python scripts/bench_cpu_kernels.py [--threads 2] [--json report.json] [bars|products|attention|pages|rows|decode]

Every figure is a median over rounds in which all implementations take turns, so that load and clock affect all alike; a
ratio is the median of the ratios within a round. More weights than the caches hold are used in turn. `read` is a plain
reduction over the same bytes. Nothing else should run: the load of the machine is in the report. `bars` are the cases
with a figure to reach, in about a minute, and run only if named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from easytorch.kernels.cpu import library
from easytorch.kernels.decode import aten as decode_aten
from easytorch.kernels.decode import cpu as decode_cpu
from easytorch.kernels.glu import aten as glu_aten
from easytorch.kernels.glu import cpu as glu_cpu
from easytorch.kernels.linear import cpu, onednn
from easytorch.kernels.quantized_matmul import aten
from easytorch.kernels.quantized_matmul import cpu as quantized_cpu
from easytorch.kernels.quantized_matmul.weight import quantize
from easytorch.kernels.ragged_page import cpu as pages_cpu
from easytorch.kernels.ragged_page import grouped as pages_aten
from easytorch.kernels.ragged_page import native as pages_native
from easytorch.kernels.rms_norm import aten as norm_aten
from easytorch.kernels.rms_norm import cpu as norm_cpu
from easytorch.kernels.rotary import aten as rotary_aten
from easytorch.kernels.rotary import cpu as rotary_cpu

# (M, N, K) of the products, and the rounds of each; bytes of weights that no cache holds.
SHAPES = [(m, n, k) for n, k in ((4096, 1024), (1024, 4096), (4096, 4096), (32000, 1024)) for m in (1, 4, 16)]
# (B, H, K, S, D) of attention of one query.
ATTENTIONS = [(1, 16, 8, 64, 64), (1, 16, 8, 1024, 64), (1, 32, 8, 4096, 128), (8, 32, 8, 4096, 128)]
# (sequences, query rows and keys of each, H, K, D, page size) of attention over pages.
PAGES = [
    (8, 1, 4096, 32, 8, 128, 16), (8, 1, 4096, 32, 8, 128, 64), (8, 1, 64, 16, 8, 64, 16), (4, 4, 1024, 32, 8, 128, 16),
    (1, 16, 1024, 32, 8, 128, 16), (1, 256, 256, 32, 8, 128, 16),
]  # fmt: skip
# Rows, and their widths, of what is computed row by row: norms, rotations (of that many tokens) and gated units.
ROWS, NORM_WIDTH, GATE_WIDTH, HEADS = (1, 16, 512), 1024, 4096, (16, 8, 64)
ROUNDS, BYTES = 15, 2**28
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def medians(ways: dict[str, Callable[[int], Any]], calls: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Implementation -> microseconds a call; the ratio of the first to each other. They are called with 0, 1, ..."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(0)
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for number in range(calls):
                way(number)
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    first = next(iter(ways))
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[first], taken, strict=True))
        for name, taken in times.items()
        if name != first
    }
    return {"us": {name: statistics.median(taken) for name, taken in times.items()}, "ratio": ratios}


def dense(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    calls = max(3, min(24, BYTES // (n * k * dtype.itemsize)))
    weights = [torch.randn(n, k, generator=generator).to(dtype) for _ in range(calls)]
    x = torch.randn(m, k, generator=generator).to(dtype)
    ways: dict[str, Callable[[int], Any]] = {
        "cpu": lambda i: cpu.run(x, weights[i], None),
        "F.linear": lambda i: F.linear(x, weights[i]),
        "read": lambda i: weights[i].view(torch.float32).max(),
    }
    if dtype == torch.float32:
        ways["onednn"] = lambda i: onednn._run(x, weights[i], None)
    found = medians(ways, calls)
    found["GB/s"] = n * k * dtype.itemsize / found["us"]["cpu"] / 1e3
    found["GF/s"] = 2 * m * n * k / found["us"]["cpu"] / 1e3
    return found


def quantized(m: int, n: int, k: int, format: str, generator: torch.Generator) -> dict[str, Any]:
    calls = max(3, min(12, BYTES // (n * k * 2)))
    originals = [torch.randn(n, k, generator=generator) for _ in range(calls)]
    weights = [quantize(weight, format) for weight in originals]
    halves = [weight.bfloat16() for weight in originals]
    x = torch.randn(m, k, generator=generator).bfloat16()
    return medians(
        {
            "cpu": lambda i: quantized_cpu.run(x, weights[i], None, library.BEST),
            "aten": lambda i: aten._forward(x, weights[i], None),
            "bfloat16 product": lambda i: cpu.run(x, halves[i], None),
            "read": lambda i: weights[i].data.view(torch.uint8).view(torch.float32).max(),
        },
        calls,
        rounds=7,
    )


def products() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for m, n, k in SHAPES:
        for dtype in DTYPES:
            found[f"M{m} N{n} K{k} {str(dtype).removeprefix('torch.')}"] = dense(m, n, k, dtype, generator)
    for m in (1, 4, 16):
        for format in quantized_cpu.FORMATS:
            found[f"M{m} N4096 K1024 {format}"] = quantized(m, 4096, 1024, format, generator)
    return found


def attention(cases: list[tuple[int, ...]] = ATTENTIONS, dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, Any]:
    """One query over a cache (B, K, S, D), and one laid out (B, S, K, D)."""
    generator, found = torch.Generator().manual_seed(0), {}
    for batch, heads, kv_heads, keys, dim in cases:
        for dtype in dtypes:
            for layout in ("BKSD", "BSKD"):
                query = torch.randn(batch, heads, 1, dim, generator=generator).to(dtype)
                shape = (batch, kv_heads, keys, dim) if layout == "BKSD" else (batch, keys, kv_heads, dim)
                caches = [torch.randn(shape, generator=generator).to(dtype) for _ in "kv"]
                key, value = caches if layout == "BKSD" else (cache.transpose(1, 2) for cache in caches)
                given = [x.transpose(1, 2) for x in (query, key, value)]
                measured = medians(
                    {
                        "cpu": lambda _, given=given: decode_cpu.decode(*given),
                        "aten": lambda _, given=given: decode_aten.decode(*given),
                        "sdpa": lambda _, q=query, k=key, v=value: F.scaled_dot_product_attention(
                            q, k, v, enable_gqa=True
                        ),
                        "read": lambda _, caches=caches: [cache.view(torch.float32).max() for cache in caches],
                    },
                    max(1, 2**23 // caches[0].numel()),
                    rounds=7,
                )
                found[f"B{batch} H{heads}/{kv_heads} S{keys} D{dim} {layout} {str(dtype)[6:]}"] = measured
    return found


def pages(cases: list[tuple[int, ...]] = PAGES, dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, Any]:
    """Sequences whose pages lie in any order; `dense` is attention of one query over as many keys side by side, `copy`
    a plain one of the pools."""
    generator, found = torch.Generator().manual_seed(0), {}
    for batch, rows, keys, heads, kv_heads, dim, size in cases:
        for dtype in dtypes:
            count = batch * keys // size
            tables = torch.randperm(count, generator=generator).int().reshape(batch, -1)
            lens, starts = torch.full((batch,), keys), torch.arange(batch + 1) * rows
            query = torch.randn(batch * rows, heads, dim, generator=generator).to(dtype)
            pools = [torch.randn(count, size, kv_heads, dim, generator=generator).to(dtype) for _ in "kv"]
            into, given = torch.empty_like(pools[0]), (query, *pools, lens, tables, starts)
            ways: dict[str, Callable[[int], Any]] = {
                "cpu": lambda _, given=given: pages_cpu.ragged_page_attention(*given),
                "aten": lambda _, given=given: pages_aten.ragged_page_attention(*given),
                "native": lambda _, given=given: pages_native.ragged_page_attention(*given),
                "read": lambda _, pools=pools: [pool.view(torch.float32).max() for pool in pools],
                "copy": lambda _, pools=pools, into=into: [into.copy_(pool) for pool in pools],
            }
            if rows == 1:
                dense = (query[:, None], *(pool.reshape(batch, keys, kv_heads, dim) for pool in pools))
                ways["dense"] = lambda _, dense=dense: decode_cpu.decode(*dense)
            measured = medians(ways, max(1, 2**21 // pools[0].numel()), rounds=7)
            measured["GB/s"] = 2 * pools[0].numel() * dtype.itemsize / measured["us"]["cpu"] / 1e3
            found[f"B{batch} T{rows} S{keys} H{heads}/{kv_heads} D{dim} page {size} {str(dtype)[6:]}"] = measured
    return found


def rows() -> dict[str, Any]:
    """A layer's operations other than matmuls and attention; gate and up are halves of one matmul, as in the layer."""
    generator, found = torch.Generator().manual_seed(0), {}
    heads, kv_heads, dim = HEADS
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for count in ROWS:
            x, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((count, NORM_WIDTH), (NORM_WIDTH,)))
            q, k, cos, sin = (
                torch.randn(1, count, *s, generator=generator).to(dtype)
                for s in ((heads, dim), (kv_heads, dim), (dim,), (dim,))
            )
            gate, up = torch.randn(count, 2 * GATE_WIDTH, generator=generator).to(dtype).chunk(2, -1)
            cases: dict[str, dict[str, Callable[[int], Any]]] = {
                f"rms_norm {count}x{NORM_WIDTH}": {
                    "cpu": lambda _, x=x, w=weight: norm_cpu.run(x, w, 1e-6, library.BEST),
                    "aten": lambda _, x=x, w=weight: norm_aten.rms_norm(x, w, 1e-6),
                    "F.rms_norm": lambda _, x=x, w=weight: F.rms_norm(x, w.shape, w, 1e-6),
                },
                f"rotary {count} tokens H{heads}/{kv_heads} D{dim}": {
                    "cpu": lambda _, given=(q, k, cos, sin): rotary_cpu.run(*given, library.BEST),
                    "aten": lambda _, given=(q, k, cos, sin): rotary_aten.rotary(*given),
                },
            }
            for name, number, aten_unit in (
                ("swiglu", glu_cpu.SILU, glu_aten.swiglu),
                ("geglu", glu_cpu.GELU["none"], glu_aten.geglu),
                ("geglu tanh", glu_cpu.GELU["tanh"], lambda gate, up: glu_aten.geglu(gate, up, "tanh")),
            ):
                cases[f"{name} {count}x{GATE_WIDTH}"] = {
                    "cpu": lambda _, given=(gate, up, number): glu_cpu.run(*given, library.BEST),
                    "aten": lambda _, unit=aten_unit, given=(gate, up): unit(*given),
                }
            for name, ways in cases.items():
                found[f"{name} {str(dtype)[6:]}"] = medians(ways, max(2, 512 // count), rounds=9)
    return found


def bars() -> dict[str, Any]:
    """The cases with a figure to reach: one row of each kind of weight, the head, a few rows, decode and pages."""
    generator, found = torch.Generator().manual_seed(0), {}
    both = DTYPES[:2]
    for m, n, k, dtypes in (
        (1, 4096, 1024, both),
        (1, 32000, 1024, both),
        (4, 4096, 1024, both),
        (16, 4096, 1024, both),
    ):
        for dtype in dtypes:
            found[f"M{m} N{n} K{k} {str(dtype)[6:]}"] = dense(m, n, k, dtype, generator)
    for format in quantized_cpu.FORMATS:
        found[f"M1 N4096 K1024 {format}"] = quantized(1, 4096, 1024, format, generator)
    return found | attention(ATTENTIONS[-1:], both) | pages(PAGES[:1], both)


def decode(new_tokens: int = 24, rounds: int = 5) -> dict[str, Any]:
    """Tokens a second through plain `generate`, of the native Llama and transformers'."""
    import transformers

    from easytorch.models.llama import LlamaForCausalLM

    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8, intermediate_size=4096,
        vocab_size=32000, max_position_embeddings=2048, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(config).to(dtype).eval()
        ours = LlamaForCausalLM(config).to(dtype).eval()
        ours.load_state_dict(theirs.state_dict())
        prompt = torch.randint(1, 32000, (1, 16), generator=torch.Generator().manual_seed(0))

        def tokens(model: Any, prompt: torch.Tensor = prompt) -> None:
            model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)

        ways = {"native": lambda _, m=ours: tokens(m), "transformers": lambda _, m=theirs: tokens(m)}
        measured = medians(ways, 1, rounds)
        measured["tokens/s"] = {name: new_tokens / taken * 1e6 for name, taken in measured["us"].items()}
        measured["times transformers"] = 1 / measured["ratio"]["transformers"]
        found[str(dtype).removeprefix("torch.")] = measured
        del ours, theirs
    return found


PARTS = {"bars": bars, "products": products, "attention": attention, "pages": pages, "rows": rows, "decode": decode}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if (reason := library.missing()) is not None:
        raise SystemExit(f"no C++ kernels: {reason}")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "threads": options.threads,
        "load": os.getloadavg(),
    }
    for part in options.parts or [part for part in PARTS if part != "bars"]:
        report[part] = PARTS[part]()
        for name, row in report[part].items():
            print(f"{name:<28}", json.dumps(row, default=lambda x: x), flush=True)
    report["load after"] = os.getloadavg()
    print({name: value for name, value in report.items() if name not in PARTS})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
