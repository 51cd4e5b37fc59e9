"""A command group that imports a command only when it runs, not at startup or for `--help`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from easytorch import cli
from easytorch.cli.help_format import FullNamesCommand, FullNamesMixin
from easytorch.cli.plain_values import PlainValues

CONTEXT = {"help_option_names": ["-h", "--help"]}
_NO_COMMANDS = ("lazy", "main", "plain_values", "help_format")


class LazyGroup(PlainValues, FullNamesMixin, TyperGroup):
    """`--help` and completion see a name and a line of help; only the command that is run is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


class Command(PlainValues, FullNamesCommand):
    """A typer command of which `--help` shows plain default values and every option's full name."""


def command_names() -> list[str]:
    """Every module of `easytorch.cli` is a command (its function `command`, and `CONTEXT`, click's settings, if it has
    any), except these."""
    return sorted(module.name for module in pkgutil.iter_modules(cli.__path__) if module.name not in _NO_COMMANDS)


def add_commands(app: typer.Typer) -> None:
    """Put every command into `app`, not imported."""
    for name in command_names():
        app.command(name, help=summary(name))(_not_loaded)


def summary(name: str) -> str:
    """A command's line in `easytorch --help`: the first of its module's docstring, read without running the module."""
    spec = importlib.util.find_spec(f"easytorch.cli.{name}")
    assert spec is not None and spec.origin is not None, f"{name} was found by pkgutil and has no source"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def load(name: str) -> Any:
    """A command, imported."""
    module = importlib.import_module(f"easytorch.cli.{name}")
    one = typer.Typer(add_completion=False, context_settings={**CONTEXT, **getattr(module, "CONTEXT", {})})
    one.command(name, cls=Command)(module.command)
    return typer.main.get_command(one)


def _not_loaded() -> None:
    raise AssertionError("LazyGroup.resolve_command replaces this command before it is run")
