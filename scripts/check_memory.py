"""Repeats small calls very often, and shows that the process does not grow by them: operations whose repeated calls are
found in C++, and all layers of a token as one call over a cache's memory and over pages, with calls that are refused.

    python scripts/check_memory.py [--calls 1000000] [--steps 100000] [--bar 512]

`--calls` are of all operations together, `--steps` of the layers over each kind of memory. Resident memory (Linux only)
is read after a tenth of them, when everything that is kept once is there, and at the end. Exit status 1 where one grew
by more than `--bar` KiB.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of this checkout, installed or not

from easytorch.kernels.cpu import library  # noqa: E402
from easytorch.kernels.decoder_step import cpu, native  # noqa: E402
from easytorch.kernels.repeated import library as repeated  # noqa: E402
from easytorch.operations import OperationRegistry  # noqa: E402

LAYERS, WIDTH, HEADS, HEAD_DIM, KEYS, PAGE = 2, 64, 4, 16, 32, 16


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def small_calls() -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Each operation with calls that are found in C++."""
    x, weight, matrix, heads, one = draw(16, 64), draw(64), draw(64, 64), draw(1, 16, 4, 16), draw(1, 1, 4, 16)
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "linear": ((draw(4, 64), matrix, weight), {}),
        "rms_norm": ((x, weight), {"eps": 1e-5}),
        "layer_norm": ((x, weight, weight), {}),
        "swiglu": ((x, x + 1), {}),
        "geglu": ((x, x + 1), {"approximate": "tanh"}),
        "attention": ((heads, heads, heads), {"causal": True}),
    }
    for name, (args, kwargs) in cases.items():
        operation = OperationRegistry.create(name)
        yield name, lambda _, run=operation, args=args, kwargs=kwargs: run(*args, **kwargs)
    attention = OperationRegistry.create("attention")
    yield "attention of one query", lambda _: attention(one, heads, heads)
    growing = OperationRegistry.create("attention")
    keys = [draw(1, n, 4, 16) for n in range(16, 512)]
    yield "attention of growing keys", lambda n: growing(one, keys[n % len(keys)], keys[n % len(keys)])
    product = OperationRegistry.create("linear")

    def refused(_: int) -> None:
        try:
            product(x, matrix[:, :5])
        except ValueError:
            return
        raise AssertionError("a product of rows that do not fit was not refused")

    yield "linear, refused", refused


def layers_of(dtype: torch.dtype) -> tuple[torch.Tensor, Any, list[Any], list[Any]]:
    """x, the packed layers of a small model, and their memory as slots and as pages."""

    def projection(n: int, k: int) -> native.Projection:
        return native.Projection((draw(n, k) / k**0.5).to(dtype))

    norm, width = draw(WIDTH).to(dtype), HEADS * HEAD_DIM
    attention = native.AttentionWeights(norm, *[projection(width, WIDTH)] * 3, projection(WIDTH, width), 1e-5)
    network = native.FeedForwardWeights(norm, *[projection(96, WIDTH)] * 2, projection(WIDTH, 96), 1e-5)
    packed = cpu.pack_layers([native.LayerWeights(attention, network, 0.25)] * LAYERS, dtype)
    angles = (draw(1, 1, HEAD_DIM).to(dtype), draw(1, 1, HEAD_DIM).to(dtype))
    slots, pages = [], []
    for _ in range(LAYERS):
        caches = [draw(1, HEADS, KEYS, HEAD_DIM).to(dtype) for _ in "kv"]
        slots.append(native.SlotOfLayer(native.Slot(*caches, 0, KEYS - 1, KEYS), angles))
        pools = [draw(KEYS // PAGE, PAGE, HEADS, HEAD_DIM).to(dtype) for _ in "kv"]
        table = torch.arange(KEYS // PAGE, dtype=torch.int32)[None]
        integers = torch.tensor([KEYS - 1]), torch.tensor([KEYS], dtype=torch.int32), table, torch.arange(2)
        pages.append(native.PagesOfLayer(native.PageSlots(*pools, *integers), angles))
    return draw(1, 1, WIDTH).to(dtype), packed, slots, pages


def steps() -> Iterator[tuple[str, Callable[[int], Any]]]:
    for dtype in (torch.float32, torch.bfloat16):
        x, packed, slots, pages = layers_of(dtype)
        ways = {"slots": (cpu.decoder_layers, slots), "pages": (cpu.decoder_layers_pages, pages)}
        for kind, (step, memory) in ways.items():

            def run(n: int, step: Any = step, memory: Any = memory, x: Any = x, packed: Any = packed) -> None:
                step(x, packed, memory)
                if n % 100 == 0:  # what was handed over is freed where the call is refused too
                    try:
                        step(x, packed, memory[:-1])
                    except RuntimeError:
                        return
                    raise AssertionError("lists that do not fit were not refused")

            yield f"layers over {kind}, {str(dtype).removeprefix('torch.')}", run


def resident() -> int:
    """KiB of this process in memory, those that were swapped out too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


def growth(call: Callable[[int], Any], count: int) -> int:
    """KiB by which the process grows in the last nine tenths of `count` calls."""
    for n in range(count // 10):
        call(n)
    gc.collect()
    before = resident()
    for n in range(count // 10, count):
        call(n)
    gc.collect()
    return resident() - before


def report(name: str, call: Callable[[int], Any], count: int) -> int:
    began = time.perf_counter()
    grown = growth(call, count)
    print(f"{name:<30} {count} calls, {grown:+} KiB, {time.perf_counter() - began:.1f} s", flush=True)
    return grown


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of the operations, together")
    parser.add_argument("--steps", type=int, default=100_000, help="of the layers over each kind of memory")
    parser.add_argument("--bar", type=int, default=512, help="KiB by which none may grow")
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        raise SystemExit("resident memory is read from /proc")
    if (reason := library.missing()) is not None:
        raise SystemExit(f"no C++ kernels: {reason}")
    print(f"repeated calls: {repeated.described()}")
    calls = list(small_calls())
    grown = [report(name, call, options.calls // len(calls)) for name, call in calls]
    if cpu.TAKES_LISTS:
        grown += [report(name, call, options.steps) for name, call in steps()]
    else:
        print("layers are no one call: torch hands no lists to operators of its stable interface")
    sys.exit(1 if max(grown) > options.bar else 0)


if __name__ == "__main__":
    main()
