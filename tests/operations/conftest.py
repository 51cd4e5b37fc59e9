"""What the tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from easytorch.operations.dispatch import check, impl
from easytorch.operations.dispatch.impl import Choice


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The differential mode, on: "operation:backend" of each comparison that has passed, at least one of them.

    Without it a test that only calls an operation under EASYTORCH_CHECK=1 passes where nothing is compared at all.
    """
    monkeypatch.setenv("EASYTORCH_CHECK", "1")
    passed: list[str] = []
    genuine = check.compare_with_definition

    def record(choice: Choice, result: Any, expected: Any) -> None:
        genuine(choice, result, expected)
        passed.append(f"{choice.implementation}:{choice.backend}")

    monkeypatch.setattr(impl, "compare_with_definition", record)
    yield passed
    assert passed, "EASYTORCH_CHECK=1 compared nothing"
