"""`--rules`: the table of a user's own model, in a Python file of theirs."""

from __future__ import annotations

import runpy
from os import PathLike
from pathlib import Path

from easytorch.bridge.rules.table import Rules


def read_rules(path: str | PathLike[str]) -> Rules:
    """`RULES` of the Python file `path`, which is run; `ValueError` for one without them."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; give a Python file that sets RULES to a table")
    found = runpy.run_path(str(file)).get("RULES")
    if not isinstance(found, tuple | list) or not found:
        raise ValueError(
            f"{file}: does not set RULES to a table: rows of (torch's name, the leaf's path, the layout), as in "
            "RULES = (('out.weight', 'out/kernel', 'linear'),)"
        )
    return tuple(tuple(row) if isinstance(row, list) else row for row in found)
