"""The examples of docs/frontend.md run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "frontend.md"


@pytest.mark.jax_cpu
def test_examples_run():
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code) >= 7
    names = {"__name__": "frontend_examples"}
    for number, example in enumerate(code):
        exec(compile(example, f"docs/frontend.md, example {number + 1}", "exec"), names)
