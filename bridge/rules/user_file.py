"""`--rules`: the table of a user's own model, in a Python file of theirs."""

from __future__ import annotations

import runpy
from os import PathLike
from pathlib import Path

from easytorch.bridge.rules.table import Rules, as_rules


def read_rules(path: str | PathLike[str]) -> Rules:
    """`RULES` of the Python file `path`, which is run; `ValueError` for one without them."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; give a Python file that sets RULES to a table")
    try:
        found = runpy.run_path(str(file)).get("RULES")
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: is no Python ({error.msg}); correct it") from error
    if not isinstance(found, tuple | list) or not found:
        raise ValueError(
            f"{file}: does not set RULES to a table: rows of (torch's name, the leaf's path, the layout), as in "
            "RULES = (('out.weight', 'out/kernel', 'linear'),)"
        )
    return as_rules(found)
