"""The registry of timed cases behind scripts/bench_ops.py, and what measures and reports them."""

from bench import attention, caches, losses, matmuls, rows, sequences
from bench.registry import CASES, select

__all__ = ["CASES", "attention", "caches", "losses", "matmuls", "rows", "select", "sequences"]
