"""`--rules`: the table of a user's own model, in a Python file."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.table import Rules, as_rules, compile_rules
from easytorch.bridge.rules.transforms import Transform


def given_rules(rules: Rules | str | PathLike[str] | None) -> Rules | None:
    """The table that a user gave, directly or as a file (`read_rules`)."""
    if isinstance(rules, str | PathLike):
        return read_rules(rules)
    return None if rules is None else as_rules(rules)


def read_rules(path: str | PathLike[str]) -> Rules:
    """`RULES` of the Python file `path`, which is executed; `ValueError` if it lacks them or fails.

    An exception in the file's layouts during a conversion becomes a `CheckpointError` that says where.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; give a Python file that sets RULES to a table")
    ended = None
    try:
        found = runpy.run_path(str(file)).get("RULES")
    except SyntaxError as error:
        raise ValueError(_not_python(file, error)) from error
    except SystemExit as error:
        ended = f"{_place(file, error)}: {_said(error)}; correct the table"
    except Exception as error:  # the boundary to a program of the user's
        raise ValueError(f"{_place(file, error)}: {_said(error)}; correct the table") from error
    if ended is not None:  # raised out here: behind the error, the file's exit would count as a signal's
        raise ValueError(ended)
    if not isinstance(found, tuple | list) or not found:
        raise ValueError(
            f"{file}: does not set RULES to a table: rows of (torch's name, the leaf's path, the layout), as in "
            "RULES = (('out.weight', 'out/kernel', 'linear'),)"
        )
    try:
        rules = as_rules(found)
        compile_rules(rules)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return tuple(
        (torch, flax, _guarded(how, file) if isinstance(how, Transform) else how) for torch, flax, how in rules
    )


def _guarded(transform: Transform, file: Path) -> Transform:
    """`transform` whose functions' errors are reported as the file's."""

    def guard(function: Callable[..., Any] | None) -> Any:
        if function is None:
            return None

        def call(given: Any) -> Any:
            try:
                return function(given)
            except CheckpointError:
                raise
            except Exception as error:  # the boundary to a program of the user's
                message = f"{_place(file, error)}: the layout {transform.name!r} fails: {_said(error)}"
                raise CheckpointError(message) from error

        return call

    names = ("to_flax", "to_torch", "flax_shape", "torch_shapes", "to_flax_parts")
    return replace(transform, **{name: guard(getattr(transform, name)) for name in names})


def _not_python(file: Path, error: SyntaxError) -> str:
    """What a file that cannot be compiled is told: of one with null bytes Python knows neither name nor line."""
    place = f"{error.filename or file}, line {error.lineno}" if error.lineno else str(error.filename or file)
    return f"{place}: is no Python ({error.msg}); correct it"


def _place(file: Path, error: BaseException) -> str:
    """The file and the last line of it that ran, where the error came out of one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}, line {lines[-1]}" if lines else str(file)


def _said(error: BaseException) -> str:
    """The kind of error and what it says, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
