"""Values that need no check are passed on as they are; all others are checked by typer."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from easytorch.cli.lazy import Command

_CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["a"], {}),
    ([""], {"name": ""}),
    (["a", "--text", "b", "--flag"], {"text": "b", "flag": True}),
    (["a", "--number", "3", "--share", "0.5"], {"number": 3, "share": 0.5}),
    (["a", "--many", "x", "--many", "y"], {"many": ["x", "y"]}),
    (["a", "--upper", "b"], {"upper": "B"}),
    (["a", "--seen", "b"], {"seen": "seen b"}),
    ([], "Missing argument"),
    (["a", "--number", "three"], "Invalid value for '--number'"),
    (["a", "--share", "-1"], "Invalid value for '--share'"),
    (["a", "--share", "nan?"], "Invalid value for '--share'"),
    (["a", "--text"], "requires an argument"),
]


@pytest.mark.parametrize(("arguments", "expected"), _CASES)
def test_every_kind_of_parameter(arguments: list[str], expected: dict[str, Any] | str) -> None:
    got: dict[str, Any] = {}

    def command(
        name: Annotated[str, typer.Argument()],
        text: Annotated[str | None, typer.Option()] = None,
        flag: Annotated[bool, typer.Option("--flag")] = False,
        number: Annotated[int | None, typer.Option(min=1)] = None,
        share: Annotated[float, typer.Option(min=0.0)] = 0.25,
        many: Annotated[list[str] | None, typer.Option()] = None,
        upper: Annotated[str | None, typer.Option(parser=str.upper)] = None,
        seen: Annotated[str | None, typer.Option(callback=lambda value: f"seen {value}")] = None,
    ) -> None:
        got.update(locals())
        del got["got"]

    app = typer.Typer()
    app.command(cls=Command)(command)
    ended = CliRunner().invoke(app, arguments)
    if isinstance(expected, str):
        assert ended.exit_code == 2 and expected in ended.output
        return
    usual = {"name": "a", "text": None, "flag": False, "number": None, "share": 0.25, "many": None, "upper": None}
    assert ended.exit_code == 0, ended.output
    assert got == {**usual, "seen": "seen None", **expected}
