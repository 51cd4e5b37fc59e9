"""What expressions and conditions of outlines mean."""

from __future__ import annotations

import pytest

from easytorch.bridge.names.outlines.language import holds, value_of

SETTINGS = {"width": 30, "heads": 4, "none": None, "kind": "gelu"}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("width", 30), ("3*width+1", 91), ("width/heads", None), ("width/3", 10), ("width/0", None), ("none*2", None)],
)
def test_values(expression: str, expected: int | None) -> None:
    assert value_of(expression, SETTINGS) == expected


@pytest.mark.parametrize(
    ("condition", "expected"), [("heads=4", True), ("heads!=4", False), ("width>heads", True), ("kind=gelu", True)]
)
def test_conditions(condition: str, expected: bool) -> None:
    assert holds(condition, SETTINGS) is expected
