"""These tests run in the environment of scripts/test_xla.sh; elsewhere they are skipped."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _environment():
    pytest.importorskip("torch_xla", reason="torch_xla has an environment of its own: scripts/test_xla.sh")


@pytest.fixture
def count_programs():
    """`count_programs(run)`: how many programs XLA compiles while `run()` runs, that it had not compiled before."""
    import torch_xla
    from torch_xla.debug import metrics

    def count(run) -> int:
        torch_xla.sync()
        before = metrics.counter_value("UncachedCompile") or 0
        run()
        return (metrics.counter_value("UncachedCompile") or 0) - before

    return count
