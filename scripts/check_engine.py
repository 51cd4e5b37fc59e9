"""The engine against each request run alone, for every native family that it supports, and random page operations.

    python scripts/check_engine.py                      200 requests for each family, 10,000 operations on pages
    python scripts/check_engine.py llama gpt_oss --requests 50
    python scripts/check_engine.py --captured           steps without prompts as graphs, recorded on the CPU

Requests arrive at random, with lengths and prefixes at random, some are aborted, and memory for a third of them makes
others begin anew. Greedy tokens must be those of `generate_tokens` in float32, except where rounding decides; sampled
ones those of the request alone in an engine. CI runs a sample (tests/generation/engine).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from easytorch.generation.engine.supported import refusal
from tests.generation.engine.page_machine import PageMachine
from tests.generation.engine.traffic import (
    arrivals,
    difference,
    families,
    model_of,
    run,
    small_engine,
)
from tests.generation.recorded_graph import recorded_graphs

_STEPS = 50
# Arrivals are this many times as dense as in the tests, so that the memory runs out again and again.
_DENSITY = 8


def check_family(family: str, count: int, number: int) -> list[str]:
    """The differences in a family's tokens; prints a line on what was run."""
    model = model_of(family)
    if (reason := refusal(model)) is not None:
        print(f"{family:20} refused: {reason}")
        return []
    requests = arrivals(count, number)
    for one in requests:
        delay = None if one.aborted_at is None else one.aborted_at - one.step
        one.step //= _DENSITY
        one.aborted_at = None if delay is None else one.step + delay
    made = functools.partial(small_engine, model, requests, at_once=16, max_batch_tokens=64)
    engine = made()
    run(engine, requests)
    wrong = [found for one in requests if (found := difference(model, one)) is not None]
    sampled = arrivals(max(1, count // 8), number + 1, aborts=False, temperature=1.0, top_p=0.95, seed=number)
    alone = copy.deepcopy(sampled)
    run(made(), sampled)
    for one, same in zip(sampled, alone, strict=True):
        run(made(), [same])
        if one.found != same.found:
            wrong.append(f"sampled {one.found}, and alone {same.found}, after {one.prompt}")
    stats = engine.stats()
    print(
        f"{family:20} {len(requests)} requests, {stats.steps} steps ({stats.captured_steps} captured), "
        f"{stats.preemptions} preemptions, "
        f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens from pages: {len(wrong)} wrong"
    )
    return [f"{family}: {one}" for one in wrong]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=families(), metavar="FAMILY")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--operations", type=int, default=10_000, help="on pages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--captured", action="store_true", help="steps without prompts as graphs, recorded on the CPU")
    given = parser.parse_args(arguments)
    with recorded_graphs(pytest.MonkeyPatch()) if given.captured else contextlib.nullcontext():
        wrong = [one for family in given.families for one in check_family(family, given.requests, given.seed)]
    how = settings(
        max_examples=max(1, given.operations // _STEPS), stateful_step_count=_STEPS, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(seed(given.seed)(PageMachine), settings=how)
    print(f"{given.operations} operations on pages")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
