"""The overhead of an operation's dispatch: a call of the operation against a direct call of the method it chooses.

    python scripts/bench_dispatch.py

Where the C++ operator is chosen, the call skips checks that the selection has made and that the direct call makes, and
a repeated call of a shortcut skips all of them: the overhead may be negative.

The two are timed in turns, so that a change of clock speed or load affects both; the figures are medians of the CPU
time of one thread, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
        "rotary": ("rotary", (heads, heads, table, table), {}),
        "attention": ("attention", (heads, heads, heads), {"causal": True}),
        "attention, every keyword given": ("attention", (heads, heads, heads), everything),
        "one query, every keyword given": ("attention", (heads[:, :1], cache, cache), everything),
    }


def overhead(call: Callable[[], Any], direct: Callable[[], Any]) -> tuple[float, float, float]:
    """Medians in microseconds: a call, a direct call, and the difference of the two within a round."""
    rounds = [(_time(call), _time(direct)) for _ in range(ROUNDS)]
    return (
        statistics.median(a for a, _ in rounds),
        statistics.median(b for _, b in rounds),
        statistics.median(a - b for a, b in rounds),
    )


def _time(function: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    for _ in range(CALLS):
        function()
    return (time.thread_time_ns() - start) / CALLS / 1000


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread\n{'operation':<32}{'call':>8}{'direct':>8}{'overhead':>10}  us")
    for label, (name, args, kwargs) in cases().items():
        operation = OperationRegistry.create(name)
        choice = operation.choose(*args, **kwargs)
        method = getattr(choice.operation, choice.method)
        figures = overhead(lambda: operation(*args, **kwargs), lambda: method(*args, **kwargs))  # noqa: B023
        print("{:<32}{:>8.1f}{:>8.1f}{:>10.2f}".format(label, *figures))


if __name__ == "__main__":
    main()
