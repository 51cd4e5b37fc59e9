"""scripts/mutate.py: every mutation of scripts/mutations/ applies, and a run tells killed from survived."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_script", ROOT / "scripts" / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutate = _load()
MUTATIONS = mutate.read_rooms(ROOT / "scripts" / "mutations")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.room}{mutation.number}")
def test_applies(mutation) -> None:
    """It changes its file, the file is still Python, and its tests are there."""
    source = (ROOT / mutation.file).read_text()
    mutated = mutation.apply(source)
    if mutation.file.endswith(".py"):
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), "the code is the same"
    for test in mutation.tests:
        if not test.startswith("-") and "/" in test:
            assert (ROOT / test.split("::")[0]).exists(), test


def test_no_mutation_stands_twice() -> None:
    seen = [(mutation.file, mutation.find, mutation.replace) for mutation in MUTATIONS]
    assert len(seen) == len(set(seen))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one function and a test that knows half of it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than the tests to run
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "code_under_test.py").write_text(
        "def scale(x):\n    return x * 2 + 0\n\n\ndef count(n):\n    while n:\n        n -= 1\n"
    )
    (root / "tests" / "test_code.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nfrom code_under_test import scale, count\n\n\n"
        "def test_scale():\n    assert scale(3) == 6\n    count(2)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def _mutation(find: str, replace: str, number: int):
    return mutate.Mutation(
        room="toy",
        number=number,
        file="code_under_test.py",
        find=find,
        replace=replace,
        tests=("tests/test_code.py",),
        breaks=f"{find} -> {replace}",
    )


def test_outcomes(project: Path) -> None:
    before = (project / "code_under_test.py").read_text()
    mutations = [
        _mutation("x * 2", "x * 3", 1),  # same size and, unless care is taken, same second as the original
        _mutation("+ 0", "- 0", 2),
    ]
    results = mutate.run_mutations(mutations, project, jobs=1, timeout=300)
    assert [result.outcome for result in results] == ["killed", "survived"]
    assert "toy                    1 of   2 killed" in mutate.summarize(results)
    assert (project / "code_under_test.py").read_text() == before


def test_a_test_that_hangs_has_noticed(project: Path, tmp_path: Path) -> None:
    checkout = mutate.Checkout(project, tmp_path / "copy", timeout=2)  # it would never end
    result = checkout.try_mutation(_mutation("n -= 1", "n -= 0", 1))
    assert result.outcome == "timeout"
    assert result.noticed


def test_tests_that_fail_anyway_notice_nothing(project: Path) -> None:
    (project / "tests" / "test_code.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(ValueError, match="without a mutation"):
        mutate.run_mutations([_mutation("x * 2", "x * 3", 1)], project, jobs=1, timeout=600)


def test_a_text_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="occurs 0 times in code_under_test"):
        _mutation("absent", "x", 1).apply("some code")
