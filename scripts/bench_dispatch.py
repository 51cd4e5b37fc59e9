"""The overhead of an operation's dispatch: a call of the operation against a direct call of the method it chooses.

    python scripts/bench_dispatch.py

Where the C++ operator is chosen, the call skips checks that the selection has made and that the direct call makes, and
a repeated call of a shortcut skips all of them: the overhead may be negative. "checked" is the call by an operation
without shortcuts; of tensors whose sizes never come back, as growing keys, a call should take as long.

The three are timed in turns, so that a change of clock speed or load affects both; the figures are medians of the CPU
time of one thread, in microseconds.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from easytorch.operations import OperationRegistry

CALLS, ROUNDS = 200, 101


def cases() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Label -> operation, arguments, keyword arguments; small tensors, where the overhead shows."""
    heads, table, cache = torch.randn(1, 4, 4, 16), torch.randn(1, 4, 16), torch.randn(1, 40, 2, 16)
    everything: dict[str, Any] = {
        "mask": None, "bias": None, "causal": True, "query_segment_ids": None, "key_segment_ids": None,
        "sliding_window": None, "softcap": None, "sinks": None, "softmax_scale": 0.25, "dropout_prob": 0.0,
        "seed": None,
    }  # fmt: skip
    return {
        "rms_norm": ("rms_norm", (torch.randn(4, 64), torch.ones(64)), {}),
        "rms_norm, eps by place": ("rms_norm", (torch.randn(4, 64), torch.ones(64), 1e-5), {}),
        "rms_norm, eps by name": ("rms_norm", (torch.randn(4, 64), torch.ones(64)), {"eps": 1e-5}),
        "rotary": ("rotary", (heads, heads, table, table), {}),
        "attention": ("attention", (heads, heads, heads), {"causal": True}),
        "attention, every keyword given": ("attention", (heads, heads, heads), everything),
        "one query, every keyword given": ("attention", (heads[:, :1], cache, cache), everything),
    }


def growing() -> dict[str, tuple[str, list[tuple[Any, ...]], dict[str, Any]]]:
    """Label -> operation, arguments of calls of which no two have the same sizes, keyword arguments."""
    cache = torch.randn(1, 1041, 2, 16)
    rows = torch.randn(1041, 64)
    return {
        "one query, growing keys": (
            "attention",
            [(torch.randn(1, 1, 4, 16), cache[:, :keys], cache[:, :keys]) for keys in range(16, 1041)],
            {"causal": True},
        ),
        "rms_norm, other rows each time": (
            "rms_norm", [(rows[:count], torch.ones(64)) for count in range(1, 257)] * 4, {},
        ),
        "rms_norm, other rows and eps": (
            "rms_norm", [(rows[: 1 + i % 4], torch.ones(64), 1e-5 * (1 + i)) for i in range(1000)], {},
        ),
    }  # fmt: skip


def medians(*functions: Callable[[], Any]) -> list[float]:
    """Medians in microseconds of each, and of the difference of the first from the last within a round."""
    rounds = [[_time(function) for function in functions] for _ in range(ROUNDS)]
    rounds = [[*times, times[0] - times[-1]] for times in rounds]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _time(function: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    for _ in range(CALLS):
        function()
    return (time.thread_time_ns() - start) / CALLS / 1000


def _each(operation: Any, calls: Iterator[tuple[Any, ...]], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: operation(*next(calls), **kwargs)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread\n{'':<32}{'call':>8}{'checked':>9}{'direct':>8}{'overhead':>10}  us")
    for label, (name, args, kwargs) in cases().items():
        operation = OperationRegistry.create(name)
        checked = _without_shortcuts(operation)
        choice = operation.choose(*args, **kwargs)
        method = getattr(choice.operation, choice.method)
        each = [_each(one, itertools.repeat(args), kwargs) for one in (operation, checked, method)]
        print("{:<32}{:>8.1f}{:>9.1f}{:>8.1f}{:>10.2f}".format(label, *medians(*each)))
    print(f"{'':<32}{'call':>8}{'checked':>9}{'more':>18}  us")
    for label, (name, calls, kwargs) in growing().items():
        operation = OperationRegistry.create(name)
        each = [_each(one, itertools.cycle(calls), kwargs) for one in (operation, _without_shortcuts(operation))]
        print("{:<32}{:>8.1f}{:>9.1f}{:>18.2f}".format(label, *medians(*each)))


def _without_shortcuts(operation: Any) -> Any:
    other = copy.copy(operation)
    other._shortcuts = None
    return other


if __name__ == "__main__":
    main()
