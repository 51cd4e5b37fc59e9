"""A sample of scripts/fuzz_contexts.py."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

fuzz: Any = importlib.import_module("scripts.fuzz_contexts")
SEED = 24
# those that compile are tests/operations/test_everywhere.py's; torch.func.jvp compiles its decompositions first, 10 s
SLOW = ("compiled", "compiled_vmap", "exported", "traced", "make_fx", "func_jvp", "func_hvp")
EAGER = [name for name in fuzz.CONTEXTS if name not in SLOW]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_operations_inside_what_torch_wraps_around_them(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz.choose_cpp_everywhere(monkeypatch.setattr)
    ran = 0
    for number in range(first, first + 50):
        case = fuzz.draw(SEED, number, fuzz.OPERATIONS, EAGER)
        problems = fuzz.outcome(case, random.Random(f"{SEED}:{number}:context"))
        assert not problems, f"--seed {SEED} --only {number} --contexts {','.join(EAGER)}: {case}\n{problems}"
        ran += problems is not None
    assert ran > 30
