"""Fuzzes the backends with seeds: special values, sizes near overflow, and both once more under another seed.

    python scripts/fuzz_backends.py --seconds 300 --seed 1
    python scripts/fuzz_backends.py --backends torch --only values

values: every operation on elements x element type x small and large arrays, NumPy against mpmath and the others against
NumPy (tests/backends/special.py). sizes: operations of sizes about 2**31, 2**62, negative and 0, in processes of their
own, which must not end (tests/backends/test_sizes.py). The exit code is 1 where something differs; the seed is printed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def values(seed: int, configs: list[str]) -> Iterator[list[str]]:
    """The differences, by operation."""
    special = importlib.import_module("tests.backends.special")
    for op_type in special.EXACT if "numpy" in configs else ():
        yield list(special.inexact(op_type, seed, 400))
    for config in configs:
        for op_type in special.OPS if config != "numpy" else ():
            for count in (None, special.LARGE):
                yield list(special.differences(config, op_type, seed, count))


def sizes(seed: int, configs: list[str]) -> Iterator[list[str]]:
    """The cases that raise anything but `BackendError`, take too long or end their process."""
    tried = importlib.import_module("tests.backends.test_sizes")
    for config in configs:
        yield tried.failures(config, seed, 300, 120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default="numpy,torch,xla")
    parser.add_argument("--only", choices=("values", "sizes"))
    options = parser.parse_args()
    end, seed, failed, done = time.monotonic() + options.seconds, options.seed, 0, 0
    parts = [part for part in (values, sizes) if options.only in (None, part.__name__)]
    while time.monotonic() < end:
        for part in parts:
            for failures in part(seed, options.backends.split(",")):
                done += 1
                failed += len(failures)
                for failure in failures:
                    print(f"{part.__name__}: {failure}", flush=True)
                if time.monotonic() > end:
                    break
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {done} runs, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
