"""Every command that a page shows, in a block or in a line: its program, script, module, options and files are there.

Installing, the whole suite and the site are too slow to be run here; what the pages show of `easytorch` is run by
test_samples.py and tests/bridge/test_page.py too. A page that is new is read as the others are.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from easytorch.cli import lazy
from easytorch.training import arguments

ROOT = Path(__file__).resolve().parents[2]
# CHANGELOG.md is left out: what it tells of may be gone by now.
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))
PROGRAMS = ("easytorch", "python", "torchrun", "pip", "pytest")
# The languages of the blocks of the pages; "" is a diagram.
LANGUAGES = {"python", "bash", "console", ""}
# What a line may begin with that is a command: a program, or a script of the repository.
_COMMAND = re.compile(rf"(?:{'|'.join(PROGRAMS)})\s|(?:scripts/[\w/]+\.\w+|\.ci/run)(?:\s|$)")
_TRAINING = ("scripts/train.py", "easytorch.training")


def blocks(page: Path) -> list[tuple[int, str, list[str]]]:
    """(line, language, lines) of every fenced block."""
    found, start, language, inside = [], 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            inside.append(line)
        elif start:
            found.append((start, language, inside))
            start, inside = 0, []
        else:
            start, language, inside = number, line[3:].strip(), []
    assert not start, f"{page}:{start}: the block does not end"
    return found


def commands(page: Path) -> list[tuple[str, str]]:
    """(page and line, command) of what a page shows; in a console, of the lines after a prompt."""
    where, found = page.relative_to(ROOT), []
    for start, language, lines in blocks(page):
        for number, line in enumerate(lines, start + 1):
            if language == "bash" or (language == "console" and line.startswith("$ ")):
                found.append((f"{where}:{number}", line.removeprefix("$ ")))
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), page.read_text("utf-8"), flags=re.M | re.S)
    spans = [(f"{where}:{text[: m.start()].count(chr(10)) + 1}", m[1]) for m in re.finditer(r"`([^`]+)`", text)]
    return found + [(place, " ".join(span.split())) for place, span in spans if _COMMAND.match(span)]


COMMANDS = [found for page in PAGES for found in commands(page)]


def problem(command: str) -> str | None:
    """What of a command is not there."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    program, *rest = words or ["", ""]
    match program:
        case "":  # settings alone
            return None
        case "easytorch":
            return _of_easytorch(rest)
        case "python":
            return _of_python(rest)
        case "torchrun":
            return _of_torchrun(rest)
        case "pip":
            return _of_pip(rest)
        case "pytest":
            return _missing_files(rest)
    if not program.startswith(("scripts/", ".ci/")):
        return f"{program!r} is no program that this test knows"
    return _of_script(program, rest)


def _of_easytorch(words: list[str]) -> str | None:
    name = words[0]
    if name.startswith("-"):
        return None if name in ("--version", "--help") else f"easytorch has no {name}"
    if name not in lazy.command_names():
        return f"easytorch has no command {name!r}; it has {', '.join(lazy.command_names())}"
    command = lazy.load(name)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if name == "train":
        known |= _options(arguments._parser("train"))
    return _unknown(words, known | {"-h", "--help"})


def _of_python(words: list[str]) -> str | None:
    if words[0] == "-m":
        return _of_module(words[1], words[2:])
    if words[0] == "-c":
        return None
    return _of_script(words[0], words[1:])


def _of_torchrun(words: list[str]) -> str | None:
    from torch.distributed.run import get_args_parser

    first = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
    reason = _unknown(words[:first], _options(get_args_parser()))
    return reason or _of_python(words[first:])


def _of_module(name: str, words: list[str]) -> str | None:
    if name == "pytest":
        return _missing_files(words)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"there is no module {name}"
    if name in _TRAINING:
        return _unknown(words, _options(arguments._parser("train")))
    return _unknown(words, _constants(Path(spec.origin)))


def _of_script(name: str, words: list[str]) -> str | None:
    file = ROOT / name
    if not file.is_file():
        return f"there is no file {name}"
    if name in _TRAINING:
        return _unknown(words, _options(arguments._parser("train")))
    if file.suffix == ".py":
        return _unknown(words, _constants(file)) or _missing_files(words)
    if not os.access(file, os.X_OK):
        return f"{name} cannot be executed"
    source = file.read_text(encoding="utf-8")
    if (passed_on := re.search(r'easytorch" (\w+) "\$@"', source)) is not None:
        return _of_easytorch([passed_on[1], *words])
    if '"$@"' in source:  # for pytest or mkdocs
        return _missing_files(words)
    return next((f"{name} has no {word}" for word in words if word not in source), None)


def _of_pip(words: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    pins = "\n".join(path.read_text("utf-8") for path in (ROOT / "scripts/requirements").glob("*.txt")).splitlines()
    for word in words[1:]:
        for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", word))):
            if extra not in extras:
                return f"there is no extra {extra}; there are {', '.join(extras)}"
        if "==" in word and word not in pins:
            return f"{word} is pinned nowhere in scripts/requirements"
    return None if words[0] == "install" else f"pip {words[0]}"


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def _constants(file: Path) -> set[str]:
    """The strings of a Python file: a parser's options are among them."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {"--help"} | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _unknown(words: list[str], known: set[str]) -> str | None:
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return next((f"there is no option {word}; there are {sorted(known)}" for word in given if word not in known), None)


def _missing_files(words: list[str]) -> str | None:
    named = [word for word in words if not word.startswith("-") and "/" in word]
    return next((f"there is no {word}" for word in named if not (ROOT / word.partition("::")[0]).exists()), None)


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_what_a_command_names_is_there(where: str, command: str) -> None:
    assert problem(command) is None, f"{where}: {command}"


def test_every_block_is_of_a_language_that_is_tested() -> None:
    found = {(page.relative_to(ROOT), line, language) for page in PAGES for line, language, _ in blocks(page)}
    assert {block for block in found if block[2] not in LANGUAGES} == set()


def test_every_page_of_the_repository_is_read() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("not a checkout")
    ours = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {page for page in listed if page not in {*ours, "CHANGELOG.md"} and not page.startswith(".")} == set()


@pytest.mark.parametrize(
    "command",
    [
        "easytorch convertt a b",
        "easytorch convert a b --no-such-option",
        "easytorch train --no-such-option 1",
        "python scripts/models_doc.py --rewrite",
        "python scripts/no_such_script.py",
        "python -m easytorch.kernels.no_such_module",
        "torchrun --no-such-option 2 scripts/train.py",
        "torchrun scripts/train.py --no-such-option",
        "scripts/no_such_script.sh",
        "scripts/test.sh tests/no_such_room",
        "scripts/quickstart.sh --slow",
        "pip install -e .[no-such-extra]",
        "pip install torch==1.0",
        "no-such-program",
    ],
)
def test_what_is_not_there_is_noticed(command: str) -> None:
    assert problem(command) is not None
