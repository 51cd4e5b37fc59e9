"""The C++ kernels against torch's own implementations: products of few rows, attention of one query and over pages,
norms, rotary, gated units, attention of many queries, its training, recurrences, small calls, and full decoding.

    python scripts/bench_cpu_kernels.py [PART ...] [--threads 1 2] [--json report.json]
    python scripts/bench_cpu_kernels.py --once                       every case once: whether all run, in minutes
    python scripts/bench_cpu_kernels.py --table report.json          that report in Markdown
    python scripts/bench_cpu_kernels.py --table report.json --page docs/kernels/cpu.md     as the page's last section

Parts: bars, products, attention, scaling, latents, experts, pages, rows, prefill, training, recurrent, tiny, decode.
Each number of threads has the rate of a matrix product and of a plain read printed before its parts.

Every figure is a median over rounds in which all implementations take turns, so that load and clock affect all alike; a
ratio is the median of the ratios within a round. More weights than the caches hold are used in turn. `read` is a plain
reduction over the same bytes, `dot` one product of keys and values, which reads both at once, and faster. Nothing else
should run: the load of the machine is in the report. `bars` are the cases with a figure to reach, in about a minute,
and run only if named.
"""

from __future__ import annotations

import argparse
import itertools
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
from easytorch.kernels.multi_latent import absorbed as latent_aten
from easytorch.kernels.multi_latent import cpu as latent_cpu
from easytorch.kernels.multi_latent import cpu_pages as latent_pages_cpu
from easytorch.kernels.multi_latent import paged as latent_pages_aten
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
from easytorch.operations import OperationMetadata, OperationRegistry

# (M, N, K) of the products, and the rounds of each; bytes of weights that no cache holds.
SHAPES = [(m, n, k) for n, k in ((4096, 1024), (1024, 4096), (4096, 4096), (32000, 1024)) for m in (1, 4, 16)]
# (B, H, K, S, D) of attention of one query.
ATTENTIONS = [(1, 16, 8, 64, 64), (1, 16, 8, 1024, 64), (1, 32, 8, 4096, 128), (8, 32, 8, 4096, 128)]
# The same over lengths and head dimensions; of as many queries as keys up to 4,096.
SCALING = [(1, 8, 2, keys, dim) for dim in (64, 128, 256) for keys in (128, 1024, 4096, 32768)]
# (H, S) of latent attention of one token, with DeepSeek's widths.
LATENTS = [(heads, keys) for heads in (16, 128) for keys in (512, 2048, 8192)]
# (sequences, query rows and keys of each, H) of the same over pages.
LATENT_PAGES = [(8, 1, 1024, 16), (8, 1, 4096, 16), (4, 1, 1024, 128), (4, 4, 1024, 16), (1, 16, 1024, 16)]
# (N, D, I, k, E) of experts.
EXPERTS = [(tokens, 1024, 512, 4, 16) for tokens in (1, 4, 16)] + [(1, 2048, 768, 8, 32)]
# (sequences, query rows and keys of each, H, K, D, page size) of attention over pages.
PAGES = [
    (8, 1, 4096, 32, 8, 128, 16), (8, 1, 4096, 32, 8, 128, 64), (8, 1, 64, 16, 8, 64, 16), (4, 4, 1024, 32, 8, 128, 16),
    (1, 16, 1024, 32, 8, 128, 16), (1, 256, 256, 32, 8, 128, 16),
]  # fmt: skip
# Rows, and their widths, of what is computed row by row: norms, rotations (of that many tokens) and gated units.
ROWS, NORM_WIDTH, GATE_WIDTH, HEADS = (1, 16, 512), 1024, 4096, (16, 8, 64)
# (B, H, K, T, D) of attention of many queries, and of its training.
PREFILLS = [(1, 16, 16, 1024, 64), (1, 32, 8, 4096, 128)]
# (B, H, T, D) of training with a bias.
BIASED = [(8, 8, 128, 64), (4, 8, 512, 64)]
# Tokens of the recurrences.
TOKENS = (1, 512, 4096)
ROUNDS, BYTES = 15, 2**28
ONCE = False  # --once
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Precedes the table in a page; what follows it is written anew.
MARK = "<!-- Everything below is written by scripts/bench_cpu_kernels.py -->"


def medians(ways: dict[str, Callable[[int], Any]], calls: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Implementation -> microseconds a call; the ratio of the first to each other. They are called with 0, 1, ..."""
    if ONCE:
        calls = rounds = 1
    # of one thread processor time, which other processes take nothing from
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(0)
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            for number in range(calls):
                way(number)
            times[name].append((clock() - start) / calls * 1e6)
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


def attention(
    cases: list[tuple[int, ...]] = ATTENTIONS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    layouts: tuple[str, ...] = ("BKSD", "BSKD"),
) -> dict[str, Any]:
    """One query over a cache (B, K, S, D), and one laid out (B, S, K, D)."""
    generator, found = torch.Generator().manual_seed(0), {}
    for batch, heads, kv_heads, keys, dim in cases:
        for dtype in dtypes:
            for layout in layouts:
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
                        "dot": lambda _, caches=caches: torch.dot(
                            *(cache.view(torch.float32).flatten() for cache in caches)
                        ),
                    },
                    max(1, 2**23 // caches[0].numel()),
                    rounds=7,
                )
                found[f"B{batch} H{heads}/{kv_heads} S{keys} D{dim} {layout} {str(dtype)[6:]}"] = measured
    return found


def latents() -> dict[str, Any]:
    """One token over a cache of latents; `read` is of the cache and the two projections."""
    generator, found = torch.Generator().manual_seed(0), {}
    for heads, keys in LATENTS:
        for dtype in DTYPES:

            def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(shape, generator=generator).to(dtype)

            ups = draw(heads, 256, 512) / 16
            cache = draw(1, keys, 512), draw(1, keys, 64)
            given = (draw(1, 1, heads, 128), draw(1, 1, heads, 64), *cache, *ups.split(128, 1))
            ways = {
                "cpu": lambda _, given=given: latent_cpu.multi_latent_attention(*given),
                "aten": lambda _, given=given: latent_aten.multi_latent_attention(*given),
                "read": lambda _, read=(ups, *cache): [x.view(torch.float32).max() for x in read],
            }
            found[f"H{heads} S{keys} {str(dtype)[6:]}"] = medians(ways, max(1, 2**11 // keys), rounds=7)
    return found | latent_pages()


def latent_pages() -> dict[str, Any]:
    """One token, or a few, of several sequences whose latents lie in pages of any order."""
    generator, found = torch.Generator().manual_seed(0), {}
    for (batch, rows, keys, heads), dtype in itertools.product(LATENT_PAGES, DTYPES):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        ups, count = draw(heads, 256, 512) / 16, batch * keys // 16
        pools = draw(count, 16, 512), draw(count, 16, 64)
        tables = torch.randperm(count, generator=generator).int().reshape(batch, -1)
        integers = torch.full((batch,), keys), tables, torch.arange(batch + 1) * rows, None
        given = (draw(batch * rows, heads, 128), draw(batch * rows, heads, 64), pools, *integers, *ups.split(128, 1))
        ways = {
            "cpu": lambda _, given=given: latent_pages_cpu.ragged_page_multi_latent_attention(*given),
            "aten": lambda _, given=given: latent_pages_aten.by_plans(*given),
            "read": lambda _, read=(ups, *pools): [x.view(torch.float32).max() for x in read],
        }
        found[f"pages B{batch} T{rows} S{keys} H{heads} {str(dtype)[6:]}"] = medians(ways, 2, rounds=5)
    return found


def experts() -> dict[str, Any]:
    """A layer's experts: one call in C++, the operations, and transformers' function that is fastest here; `read` is of
    the chosen experts' weights. "stored as (E, K, N)": gpt-oss's."""
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from easytorch.layers import experts as layer
    from easytorch.models.gpt_oss import GptOssExperts

    found, step = {}, layer.experts_step
    for (tokens, width, inner, k, count), columns in itertools.product(EXPERTS, (False, True)):
        for dtype in DTYPES[:2]:
            generator = torch.Generator().manual_seed(0)
            config: Any = transformers.Qwen3MoeConfig(hidden_size=width)
            if columns:
                config = transformers.GptOssConfig(hidden_size=width, intermediate_size=inner, num_local_experts=count)
            module = (GptOssExperts(config) if columns else layer.Experts(config, count, inner)).to(dtype)
            module.reset_parameters(0.02)
            x = torch.randn(tokens, width, generator=generator).to(dtype)
            picks = [
                torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(tokens)]) for _ in range(16)
            ]
            weights = torch.rand(tokens, k, generator=generator)

            def ours(n: int, few: Any, given: Any = (module, x, picks, weights)) -> Any:
                layer.experts_step = few
                try:
                    return layer.apply_experts(given[0], given[1], given[2][n % 16], given[3])
                finally:
                    layer.experts_step = step

            def read(n: int, given: Any = (module, picks)) -> Any:
                stacks = given[0].gate_up_proj, given[0].down_proj
                return [x[e].view(torch.float32).max() for e in given[1][n % 16].unique().tolist() for x in stacks]

            ways = {
                "cpu": lambda n, run=ours: run(n, step),
                "operations": lambda n, run=ours: run(n, lambda *_: None),
                "grouped_mm": lambda n, given=(module, x, picks, weights): ALL_EXPERTS_FUNCTIONS["grouped_mm"](
                    given[0], given[1], given[2][n % 16], given[3]
                ),
                "read": read,
            }
            stored = ", stored as (E, K, N)" if columns else ""
            found[f"N{tokens} D{width} I{inner} {k} of {count} {str(dtype)[6:]}{stored}"] = medians(ways, 16, rounds=7)
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


def machine() -> dict[str, Any]:
    """What this machine does at best: a square product of each dtype in GF/s, and a plain read in GB/s."""
    found, size = {}, 2048
    for dtype in DTYPES[:2]:
        x = torch.randn(size, size).to(dtype)
        taken = medians({"mm": lambda _, x=x: x @ x}, 1, rounds=5)["us"]["mm"]
        found[f"product {str(dtype)[6:]}"] = {"GF/s": 2 * size**3 / taken / 1e3}
    memory = torch.ones(BYTES // 4)
    taken = medians({"read": lambda _: memory.max()}, 1, rounds=5)["us"]["read"]
    return {**found, "read": {"GB/s": BYTES / taken / 1e3}}


def scaling() -> dict[str, Any]:
    """Attention of one query over 128 to 32,768 keys and of as many queries as keys, with head dimensions 64 to 256."""
    of_many = [case for case in SCALING if case[3] <= 4096]
    one = attention(SCALING, DTYPES[:2], layouts=("BKSD",))
    return {f"one query {name}": row for name, row in one.items()} | many_queries(train=False, cases=of_many)


def many_queries(train: bool, cases: list[tuple[int, ...]]) -> dict[str, Any]:
    """Causal attention of as many queries as keys, beside SDPA's; GF/s counts the products of what is seen."""
    found = {}
    operation = OperationRegistry.create("flash", OperationMetadata(backend="cpu"))
    for batch, heads, kv_heads, length, dim in cases:
        for dtype in DTYPES[:2]:
            generator = torch.Generator().manual_seed(0)
            shapes = [(batch, length, count, dim) for count in (heads, kv_heads, kv_heads)]
            query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            upstream = torch.randn(shapes[0], generator=generator).to(dtype)
            given = [x.requires_grad_(train) for x in (query, key, value)]

            def sdpa(given: list[torch.Tensor] = given) -> torch.Tensor:
                turned = (x.transpose(1, 2) for x in given)
                return F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)

            def ours(given: list[torch.Tensor] = given) -> torch.Tensor:
                output: torch.Tensor = operation(*given, causal=True).attention_outputs
                return output

            def run(way: Callable[[], torch.Tensor], given: Any = given, upstream: torch.Tensor = upstream) -> Any:
                with torch.set_grad_enabled(train):
                    output = way()
                    return torch.autograd.grad(output, given, upstream) if train else output

            ways = {"cpu": lambda _, run=run, way=ours: run(way), "sdpa": lambda _, run=run, way=sdpa: run(way)}
            row = medians(ways, 1, rounds=5)
            products = (7 if train else 2) * batch * heads * length * length * dim
            row["GF/s"] = products / row["us"]["cpu"] / 1e3
            found[f"B{batch} H{heads}/{kv_heads} T{length} D{dim} {str(dtype)[6:]}"] = row
    return found


def prefill() -> dict[str, Any]:
    return many_queries(train=False, cases=PREFILLS)


def training() -> dict[str, Any]:
    return many_queries(train=True, cases=PREFILLS[:1]) | trained_bias()


def trained_bias() -> dict[str, Any]:
    """Attention with a trained bias (1, H, T, T), as T5's, forward and backward, beside SDPA's."""
    found = {}
    operation = OperationRegistry.create("flash", OperationMetadata(backend="cpu"))
    for batch, heads, length, dim in BIASED:
        for dtype in DTYPES[:2]:
            generator = torch.Generator().manual_seed(0)
            shapes = [(batch, length, heads, dim)] * 4 + [(1, heads, length, length)]
            upstream, *given = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            given = [x.requires_grad_() for x in given]

            def sdpa(given: list[torch.Tensor] = given) -> torch.Tensor:
                turned = (x.transpose(1, 2) for x in given[:3])
                return F.scaled_dot_product_attention(*turned, attn_mask=given[3]).transpose(1, 2)

            def ours(given: list[torch.Tensor] = given) -> torch.Tensor:
                output: torch.Tensor = operation(*given[:3], bias=given[3]).attention_outputs
                return output

            def run(way: Callable[[], torch.Tensor], given: Any = given, upstream: torch.Tensor = upstream) -> Any:
                return torch.autograd.grad(way(), given, upstream)

            ways = {"cpu": lambda _, run=run, way=ours: run(way), "sdpa": lambda _, run=run, way=sdpa: run(way)}
            found[f"bias B{batch} H{heads} T{length} D{dim} {str(dtype)[6:]}"] = medians(ways, 1, rounds=5)
    return found


def recurrent() -> dict[str, Any]:
    """The recurrences of some layers, by the operators and by ATen, without gradients and with them."""
    found: dict[str, Any] = {}
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads, gates = draw(1, tokens, 24, 64), draw(1, tokens, 24)
        cases = {
            "causal_conv1d": (draw(1, tokens, 2048), draw(2048, 4), draw(2048)),
            "ssm1": (
                draw(1, tokens, 1536), draw(1, tokens, 1536).exp() / 20, -draw(1536, 16).exp(), draw(1, tokens, 16),
                draw(1, tokens, 16),
            ),
            "ssm2": (
                heads, gates.exp() / 20, -draw(24).exp(), draw(1, tokens, 1, 128), draw(1, tokens, 1, 128),
            ),
            "gated_delta_rule": (
                draw(1, tokens, 8, 128), draw(1, tokens, 8, 128) / 12, draw(1, tokens, 16, 128),
                -draw(1, tokens, 16).exp(), draw(1, tokens, 16).sigmoid(),
            ),
        }  # fmt: skip
        for name, given in cases.items():
            ways = {}
            for backend in ("cpu", "aten"):
                operation = OperationRegistry.create(name, OperationMetadata(backend=backend))
                ways[backend] = lambda _, run=operation, given=given: run(*given)
            found[f"{name} T{tokens}"] = medians(ways, max(1, 64 // tokens), rounds=5)
            if tokens == 1:
                continue
            leaves = [x.clone().requires_grad_() for x in given]

            def train(operation: Any, leaves: list[torch.Tensor] = leaves) -> Any:
                with torch.enable_grad():
                    return torch.autograd.grad(operation(*leaves).outputs.sum(), leaves)

            ways = {}
            for backend in ("cpu", "aten"):
                operation = OperationRegistry.create(name, OperationMetadata(backend=backend))
                ways[backend] = lambda _, operation=operation, train=train: train(operation)
            found[f"{name} T{tokens}, training"] = medians(ways, 1, rounds=3)
    return found


def tiny() -> dict[str, Any]:
    """Calls so small that choosing an implementation is most of their time, by the automatic choice and by torch."""
    x, weight = torch.randn(1, 16, 64), torch.randn(64)
    up, bias = torch.randn(1, 16, 64), torch.randn(64)
    query, key, value = (torch.randn(1, 16, 4, 16) for _ in range(3))
    rows, matrix, one = torch.randn(4, 64), torch.randn(64, 64), query[:, :1].contiguous()
    create = OperationRegistry.create
    attention_, rms, layer, gate, product = map(create, ("attention", "rms_norm", "layer_norm", "swiglu", "linear"))
    turned = [given.transpose(1, 2) for given in (query, key, value)]
    cases: dict[str, dict[str, Callable[[int], Any]]] = {
        "attention T16 H4 D16": {
            "automatic": lambda _: attention_(query, key, value, causal=True),
            "torch": lambda _: F.scaled_dot_product_attention(*turned, is_causal=True),
        },
        "attention T1 S16 H4 D16": {
            "automatic": lambda _: attention_(one, key, value),
            "torch": lambda _: F.scaled_dot_product_attention(one.transpose(1, 2), *turned[1:]),
        },
        "rms_norm 16x64": {
            "automatic": lambda _: rms(x, weight),
            "torch": lambda _: F.rms_norm(x, (64,), weight, 1e-6),
        },
        "layer_norm 16x64": {
            "automatic": lambda _: layer(x, weight, bias),
            "torch": lambda _: F.layer_norm(x, (64,), weight, bias),
        },
        "swiglu 16x64": {"automatic": lambda _: gate(x, up), "torch": lambda _: F.silu(x) * up},
        "linear 4x64x64": {"automatic": lambda _: product(rows, matrix), "torch": lambda _: F.linear(rows, matrix)},
    }
    return {name: medians(ways, 200, rounds=9) for name, ways in cases.items()}


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


PARTS = {
    "bars": bars, "products": products, "attention": attention, "scaling": scaling, "latents": latents,
    "experts": experts, "pages": pages, "rows": rows, "prefill": prefill, "training": training, "recurrent": recurrent,
    "tiny": tiny, "decode": decode,
}  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """A report as Markdown: the machine and its rates, then of each part the time of its first way over others'."""
    load = ", ".join(f"{one:.1f}" for one in (report["load"][0], report["load after"][0]))
    lines = [f"{report['cpu']}, torch {report['torch']}, load before and after {load}.", ""]
    for threads in report["threads"]:
        parts = report[f"{threads} threads"]
        rates = (f"{name} {value:.0f} {unit}" for name, row in parts["machine"].items() for unit, value in row.items())
        lines += [f"{threads} {'thread' if threads == 1 else 'threads'}: {', '.join(rates)}.", ""]
        for part, rows in parts.items():
            if part == "machine":
                continue
            others = list(dict.fromkeys(name for row in rows.values() for name in row["ratio"]))
            lines += [f"| {' | '.join([part, 'us', *(f'of {name}' for name in others)])} |"]
            lines += ["|---" * (len(others) + 2) + "|"]
            for case, row in rows.items():
                ratios = (f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in others)
                first = next(iter(row["us"].values()))
                lines += [f"| {' | '.join([case, f'{first:.0f}', *ratios])} |"]
            lines += [""]
    return "\n".join(lines)


def write(path: Path, markdown: str) -> None:
    """The table as the last section of a page, in place of the one that it ends with."""
    before, _, _ = path.read_text(encoding="utf-8").partition(MARK)
    heading = "" if before.rstrip().endswith("## Measured") else "\n\n## Measured"
    path.write_text(f"{before.rstrip()}{heading}\n\n{MARK}\n\n{markdown.rstrip()}\n", encoding="utf-8")


@torch.no_grad()
def main() -> None:
    global ONCE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything by default")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="one after another")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--table", type=Path, help="measure nothing: print that report as Markdown")
    parser.add_argument("--page", type=Path, help="write --table there, as the last section of that page")
    parser.add_argument("--once", action="store_true", help="call everything once: the figures mean nothing")
    options = parser.parse_args()
    if options.page is not None and options.table is None:
        parser.error("--page takes the table of a report: give --table too")
    if options.table is not None:
        markdown = table(json.loads(options.table.read_text()))
        if options.page is None:
            print(markdown)
        else:
            write(options.page, markdown)
        return
    ONCE = options.once
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
    for threads in options.threads:
        torch.set_num_threads(threads)
        of_threads = report[f"{threads} threads"] = {}
        for part in ("machine", *(options.parts or [part for part in PARTS if part != "bars"])):
            began = time.perf_counter()
            of_threads[part] = machine() if part == "machine" else PARTS[part]()
            for name, row in of_threads[part].items():
                print(f"{threads} {name:<28}", json.dumps(row, default=lambda x: x), flush=True)
            print(f"{threads} {part} took {time.perf_counter() - began:.0f} s", flush=True)
    report["load after"] = os.getloadavg()
    print({name: value for name, value in report.items() if not isinstance(value, dict)})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
