"""Timing: ours and every baseline in turns in one process, so that a change of clock or load affects all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.registry import Calls, Case

SAMPLE_NS = 400_000  # a timed sample repeats a call until it lasts about this long
MIN_ROUNDS, MAX_ROUNDS = 3, 301
HOPELESS = 1.6  # a baseline slower than the best by this factor in the first look is not timed further


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times are medians in milliseconds; `ratio` is the median over the rounds of ours / best of torch's own."""

    operation: str
    name: str
    shape: str
    dtype: str
    passes: str
    tiny: bool
    implementation: str
    backend: str
    reason: str
    ours_ms: float
    baseline: str
    baseline_ms: float
    ratio: float
    ratio_low: float  # the quartiles of the rounds
    ratio_high: float
    rounds: int
    torch_ms: dict[str, float]
    reach: float | None
    reach_of: str | None
    reach_ratio: float | None  # the ratio that `reach` speaks of
    bandwidth_gbps: float | None
    copy_share: float | None
    tflops: float | None

    @property
    def label(self) -> str:
        name = f"{self.operation}: {self.name}" if self.name else self.operation
        return f"{name} {self.shape} {self.dtype} {self.passes}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MismatchError(AssertionError):
    """The operation and the baseline do not compute the same."""


def run_case(case: Case, device: torch.device, seconds: float, copy_gbps: float) -> Result:
    """Measures for about `seconds`, in at least three rounds."""
    calls, tensors = case.build(device)
    choice = calls.choice
    _compare(case, calls)
    functions = {"": calls.ours, **calls.torch}
    if case.backward:
        functions = {name: _with_backward(call, tensors.leaves) for name, call in functions.items()}
    with torch.set_grad_enabled(case.backward):
        functions = _promising(functions, device, keep=case.reach.of if case.reach else None)
        rounds = _rounds(functions, device, seconds)
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    ours = medians.pop("")
    best = min(medians, key=medians.__getitem__)
    ratios = _ratios(rounds, best)
    quartiles = statistics.quantiles(ratios, n=4)
    goal = case.reach
    reached = None if goal is None else statistics.median(_ratios(rounds, goal.of or best))
    moved = _work(calls.moved, calls.moved_backward, case.backward)
    flops = _work(calls.flops, calls.flops_backward, case.backward)
    bandwidth = None if moved is None else moved / ours
    return Result(
        operation=case.operation, name=case.name, shape=case.shape, dtype=case.dtype, passes=case.passes,
        tiny=case.tiny, implementation=choice.implementation, backend=choice.backend, reason=choice.reason,
        ours_ms=ours / 1e6, baseline=best, baseline_ms=medians[best] / 1e6, ratio=statistics.median(ratios),
        ratio_low=quartiles[0], ratio_high=quartiles[2], rounds=len(ratios),
        torch_ms={name: value / 1e6 for name, value in medians.items()},
        reach=None if goal is None else goal.ratio, reach_of=None if goal is None else goal.of, reach_ratio=reached,
        bandwidth_gbps=bandwidth, copy_share=None if bandwidth is None else bandwidth / copy_gbps,
        tflops=None if flops is None else flops / ours / 1e3,
    )  # fmt: skip


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a copy too large for any cache, bytes read and written counted."""
    source = torch.ones((1 << 28) if device.type == "cuda" else (1 << 26), device=device)
    target = torch.empty_like(source)
    times = _rounds({"copy": lambda: target.copy_(source)}, device, 0.5)["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def _work(forward: float | None, backward: float | None, both: bool) -> float | None:
    if not both:
        return forward
    return None if forward is None or backward is None else forward + backward


def _rounds(functions: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Nanoseconds a call of each function, one figure a round; who goes first changes from round to round."""
    repeats = {name: _repeats(function, device) for name, function in functions.items()}
    names, times = list(functions), {name: list[float]() for name in functions}
    began, done = time.perf_counter(), 0
    while done < MIN_ROUNDS or (time.perf_counter() - began < seconds and done < MAX_ROUNDS):
        for name in names[done % len(names) :] + names[: done % len(names)]:
            times[name].append(_sample(functions[name], repeats[name], device))
        done += 1
    return times


def _repeats(function: Callable[[], Any], device: torch.device) -> int:
    _sample(function, 2, device)  # compiles, fills caches
    return max(1, min(1000, math.ceil(SAMPLE_NS / _sample(function, 1, device))))


def _sample(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Nanoseconds a call."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e6 / repeats
    start = time.perf_counter_ns()
    for _ in range(repeats):
        function()
    return (time.perf_counter_ns() - start) / repeats


def _promising(
    functions: dict[str, Callable[[], Any]], device: torch.device, keep: str | None
) -> dict[str, Callable[[], Any]]:
    """Ours, the baselines that a first look does not rule out, and `keep`."""
    if len(functions) <= 2:
        return functions
    first = {name: min(_rounds({name: call}, device, 0.0)[name]) for name, call in functions.items() if name}
    limit = HOPELESS * min(first.values())
    return {name: call for name, call in functions.items() if not name or name == keep or first[name] <= limit}


def _ratios(rounds: dict[str, list[float]], baseline: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(rounds[""], rounds[baseline], strict=True)]


def _with_backward(call: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], Any]:
    """The call and its gradients by `leaves`, for an upstream gradient drawn once."""
    with torch.enable_grad():
        outputs = _tensors(call())
    upstream = [torch.ones_like(t) if t.dim() == 0 else torch.randn_like(t) for t in outputs]

    def run() -> Any:
        return torch.autograd.grad(_tensors(call()), leaves, upstream)

    return run


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


@torch.no_grad()
def _compare(case: Case, calls: Calls) -> None:
    """Every baseline computes what we do, as far as two ways to round agree."""
    expected = [t.double() for t in _tensors(calls.ours())]
    for name, call in calls.torch.items():
        for got, want in zip(_tensors(call()), expected, strict=True):
            error = float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
            if not error <= 0.02:
                raise MismatchError(f"{case.label}: {name} differs from the operation by {error:.2g} (relative RMS)")
