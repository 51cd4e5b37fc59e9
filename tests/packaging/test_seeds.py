"""Random numbers of the suite: drawn by tests/conftest.py's seeds, and by no generator without one."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SCRIPTS = TESTS.parent / "scripts"

# Called without arguments these seed themselves from the clock or the system.
NEED_A_SEED = ("default_rng", "RandomState", "SeedSequence", "PCG64", "Philox", "MT19937", "SFC64", "Random")
NEVER = ("os.urandom", "random.SystemRandom", "secrets.token_bytes", "secrets.token_hex", "secrets.randbelow")
# Global generators: seeded for each test and fixture, and not while a module is imported.
GLOBAL = re.compile(
    r"(np|numpy)\.random\.(?!default_rng|RandomState|SeedSequence|PCG64|Philox|MT19937|SFC64|Generator)\w+"
    r"|torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial)(_like)?"
    r"|random\.(random|randint|randrange|choice|choices|sample|shuffle|uniform|gauss|getrandbits|randbytes)"
)


def unseeded(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, call) of every draw whose seed nothing fixes."""
    seeded = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "manual_seed"
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        none = not node.args and not node.keywords
        if name in NEVER or (last in NEED_A_SEED and none) or (name == "torch.Generator" and id(node) not in seeded):
            found.append((node.lineno, name))
    return found + [(node.lineno, ast.unparse(node.func)) for node in _run_on_import(tree) if _is_global(node)]


def _is_global(call: ast.Call) -> bool:
    given = any(keyword.arg == "generator" for keyword in call.keywords)
    return bool(GLOBAL.fullmatch(ast.unparse(call.func))) and not given


def _run_on_import(tree: ast.AST) -> list[ast.Call]:
    """Calls outside functions: decorators, parameters and constants of a module among them."""
    calls, waiting = [], list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [*node.decorator_list, *node.args.defaults]
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Call):
                calls.append(node)
            waiting += ast.iter_child_nodes(node)
    return calls


def test_nothing_draws_without_a_seed():
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {call}"
        for folder in (TESTS, SCRIPTS)
        for path in sorted(folder.rglob("*.py"))
        for line, call in unseeded(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], "give these a seed"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(): np.random.default_rng()", 1),
        ("def f(): np.random.default_rng(0)", 0),
        ("def f(): g = torch.Generator()", 1),
        ("def f(): g = torch.Generator('cpu').manual_seed(3)", 0),
        ("def f(): random.Random()", 1),
        ("def f(): torch.randn(3)", 0),
        ("X = torch.randn(3)", 1),
        ("X = torch.randn(3, generator=torch.Generator().manual_seed(1))", 0),
        ("class C:\n    x = np.random.normal(3)", 1),
        ("@mark(torch.rand(2))\ndef f(): ...", 1),
        ("F = {'a': lambda: torch.rand(2)}", 0),
        ("def f(): os.urandom(3)", 1),
    ],
)
def test_the_reader_sees_every_form(code, count):
    assert len(unseeded(ast.parse(code))) == count


PROBE = """
import random
import numpy as np
import pytest
import torch

def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))

@pytest.fixture(scope="module")
def shared():
    return draw()

@pytest.fixture
def own():
    return draw()

@pytest.mark.parametrize("which", ["a", "b"])
def test_draws(shared, own, which):
    print("drawn", which, shared, own, draw())
    assert False

def test_another(own):
    draw()
"""


def drawn(folder: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """What the probe's tests drew, by the test, and the report."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600).stdout
    return dict(re.findall(r"^drawn (\w) (.*)$", text, re.MULTILINE)), text


def test_a_test_draws_the_same_alone_and_among_others(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_probe.py").write_text(PROBE)
    together, report = drawn(tmp_path)
    alone, _ = drawn(tmp_path, "test_probe.py::test_draws[b]")
    assert together.keys() == {"a", "b"} and together["a"] != together["b"]
    assert alone == {"b": together["b"]}
    assert re.search(r"- random numbers -+\ndrawn with --test-seed 0: seed \d+ of this test", report)
    other, report = drawn(tmp_path, "test_probe.py::test_draws[b]", "--test-seed", "5")
    assert other["b"] != together["b"] and "drawn with --test-seed 5" in report
