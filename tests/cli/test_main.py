from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from easytorch import __version__, missing_packages
from easytorch.cli import env, lazy
from easytorch.cli.lazy import command_names, summary
from easytorch.cli.main import app, main
from easytorch.training import arguments

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "jax", "numpy", "matplotlib"}


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "COLUMNS": "100", **variables},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def exit_code(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


def test_help_lists_every_command_and_imports_nothing_heavy():
    done = run("-X", "importtime", "-m", "easytorch", "--help")
    assert done.returncode == 0
    for name in command_names():
        assert re.search(rf"│ {name} +{re.escape(summary(name)[:30])}", done.stdout), name
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("name", command_names())
def test_a_command_is_a_module_with_a_docstring_and_a_function(name):
    assert summary(name).endswith(".")
    assert callable(importlib.import_module(f"easytorch.cli.{name}").command)


@pytest.mark.parametrize("name", command_names())
def test_the_help_of_a_command_is_shown(name, capsys):
    assert exit_code(name, "--help") == 0
    assert "--" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 100])
def test_no_terminal_is_too_narrow_for_a_name(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (None, *command_names()):
        assert exit_code(*filter(None, [command]), "--help") == 0
        shown = capsys.readouterr().out
        assert "…" not in shown, command
        params = get_command(app).params if command is None else lazy.load(command).params
        for name in (name for one in params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")):
            assert name in shown, command


def test_the_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"easytorch {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["env", "--no-such-flag"], ["generate"], ["--no-such-flag"]]
)
def test_wrong_usage_is_2(arguments, capsys):
    assert exit_code(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert exit_code("generat") == 2
    assert "'generate'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "x/config.json"),
         "error: [Errno 2] No such file or directory: 'x/config.json'\n"),
        (ModuleNotFoundError("pip install it"), "error: pip install it\n"),
        (ValueError(), "error: ValueError\n"),
    ],
)  # fmt: skip
def test_an_error_of_the_user_is_one_line_and_2(error, line, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(env, "collect", fail)
    monkeypatch.delenv("EASYTORCH_TRACEBACK", raising=False)
    assert exit_code("env") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)


@pytest.mark.parametrize(("interruption", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
@pytest.mark.parametrize("error", [ImportError("initialization failed"), RuntimeError("unexpected pos 704 vs 598")])
def test_a_signal_is_one_whatever_a_library_makes_of_it(interruption, code, error, monkeypatch, capsys):
    """pybind11's modules say so where their import is interrupted, torch.save where it closes its archive."""

    def fail():
        try:
            raise interruption
        finally:
            raise error

    monkeypatch.setattr(env, "collect", fail)
    monkeypatch.delenv("EASYTORCH_TRACEBACK", raising=False)
    assert exit_code("env") == code
    assert capsys.readouterr().err == ""


def test_a_package_that_was_interrupted_is_not_missing(monkeypatch):
    """Also for who calls the bridge: Ctrl-C remains Ctrl-C."""
    from easytorch.bridge.formats import tensorstore_arrays as store
    from easytorch.bridge.formats.gguf_files import blocks

    class Interrupted:
        def find_spec(self, name, path, target=None):
            if name not in ("tensorstore", "gguf"):
                return None
            try:
                raise KeyboardInterrupt
            finally:
                raise ImportError("initialization failed")

    for name, load in (("tensorstore", store.load_tensorstore), ("gguf", blocks.require_gguf)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
        with pytest.raises(KeyboardInterrupt):
            load()


def _import_error(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        return error
    raise AssertionError(f"{name} was found")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no_such_package", "the package 'no_such_package' is not installed: pip install no_such_package"),
        (
            "json.no_such_part",
            "the package 'json' has no 'json.no_such_part'; another version may: pip install --upgrade json",
        ),
        ("easytorch.no_such_part", "No module named 'easytorch.no_such_part'"),
    ],
)
def test_a_missing_package_says_what_to_install(name, line, monkeypatch, capsys):
    """Also in the trainer, which has an end of its own for what its processes raise."""
    error = (
        ModuleNotFoundError("No module named 'json.no_such_part'", name=name) if "json" in name else _import_error(name)
    )

    def fail():
        raise error

    monkeypatch.setattr(env, "collect", fail)
    monkeypatch.delenv("EASYTORCH_TRACEBACK", raising=False)
    assert exit_code("env") == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert (arguments._report(error), capsys.readouterr().err.startswith("Traceback")) == (
        (1, True) if "easytorch" in name else (2, False)
    )


def test_the_extras_of_packages_are_those_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in missing_packages._EXTRAS.items():
        if package != "jaxlib":  # comes with jax
            assert any(re.match(rf"{package.replace('_', '[_-]')}\b", line) for line in declared[extra]), (
                package,
                extra,
            )
    error = ModuleNotFoundError("No module named 'gguf'", name="gguf")
    assert missing_packages.what_to_install(error).endswith('pip install "easytorch[bridge]"')


@pytest.mark.parametrize("command", ["easytorch", "train"])
def test_letters_that_the_terminal_lacks_are_escaped(command, monkeypatch):
    """As on stderr. A strict stdout made an error of a conversion that was done, and ended a training run."""

    def say(*_):
        print("modèle 出")
        raise SystemExit

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(env, "collect", say)
    monkeypatch.setattr(arguments, "parse", say)
    with pytest.raises(SystemExit):
        main(["env"]) if command == "easytorch" else arguments.run([], "train")
    assert written.getvalue() == rb"mod\xe8le \u51fa" + b"\n"


def test_an_unexpected_error_is_not_hidden(monkeypatch):
    def fail():
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(env, "collect", fail)
    with pytest.raises(ZeroDivisionError):
        main(["env"])


def test_a_switch_that_means_nothing_is_said_before_anything_else(monkeypatch, capsys):
    monkeypatch.setenv("EASYTORCH_TRACEBACK", "maybe")
    assert exit_code("env") == 2
    assert capsys.readouterr().err.startswith("error: EASYTORCH_TRACEBACK='maybe' is neither on (1, true")


@pytest.mark.parametrize("variable", ["no", "0", "false", "OFF", ""])
def test_a_switch_that_is_off(variable, monkeypatch, capsys):
    def fail():
        raise ValueError("for the user")

    monkeypatch.setattr(env, "collect", fail)
    monkeypatch.setenv("EASYTORCH_TRACEBACK", variable)
    assert exit_code("env") == 2
    assert capsys.readouterr().err == "error: for the user\n"


@pytest.mark.parametrize(("flags", "variable"), [(["--debug"], "0"), ([], "1"), ([], "true")])
def test_the_traceback_is_shown_when_asked_for(flags, variable, monkeypatch):
    def fail():
        raise ValueError("for the user")

    monkeypatch.setattr(env, "collect", fail)
    monkeypatch.setenv("EASYTORCH_TRACEBACK", variable)
    with pytest.raises(ValueError, match="for the user"):
        main([*flags, "env"])


def test_completion_offers_commands_and_their_flags():
    def complete(line):
        words = line.split(" ")
        return run(
            "-m", "easytorch", _EASYTORCH_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
        ).stdout.split()

    assert complete("easytorch g") == ["generate"]
    assert "--json" in complete("easytorch env --")
