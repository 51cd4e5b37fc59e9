"""docs/add-an-operation.md: its class, as it stands, computes, chooses and is refused like the operation it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from easytorch import OperationMetadata, OperationRegistry

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add-an-operation.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(monkeypatch):
    """The page's class, registered where its name is free."""
    (sample,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.setattr(OperationRegistry, "_classes", {})
    exec(compile(sample, "docs/add-an-operation.md", "exec"), {"__name__": "sample"})
    return OperationRegistry.get("rms_norm")


def test_it_computes_by_the_path_it_lists(shown) -> None:
    x, weight = torch.randn(3, 7), torch.randn(7)
    expected = torch.nn.functional.rms_norm(x.double(), (7,), weight.double(), 1e-6)
    operation = shown()
    assert operation.choose(x, weight).backend == "aten"
    for metadata in (None, OperationMetadata(backend="native")):
        torch.testing.assert_close(shown(metadata)(x, weight).double(), expected, rtol=1e-5, atol=1e-6)


def test_what_the_page_says_of_it(shown) -> None:
    """Its methods, and the field that is refused since the class does not read it."""
    assert {"forward_cpu", "forward_gpu"} <= set(vars(shown))
    with pytest.raises(ValueError, match="softmax_scale"):
        OperationRegistry.create("rms_norm", OperationMetadata(softmax_scale=2.0))
