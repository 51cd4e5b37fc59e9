"""Stage 5: which implementation each operation picks on each platform."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.table import Table

from easytorch.cli.demo.stage import Demo
from easytorch.operations.dispatch.platform import PLATFORMS
from easytorch.operations.dispatch.table import Row, choices


def run(demo: Demo) -> None:
    demo.console.print(table(choices()))
    demo.say("Why, and for which call: easytorch env")


def table(rows: list[Row]) -> Table:
    """One row per operation: what runs on each platform, followed by the backend if that has another name."""
    made = Table(box=box.SIMPLE)
    made.add_column("operation", no_wrap=True)
    for column in PLATFORMS:
        made.add_column(column, overflow="fold")
    for operation, group in groupby(rows, key=lambda row: row.operation):
        picked = {row.platform: _cell(row) for row in group}
        made.add_row(operation, *(picked.get(platform, "") for platform in PLATFORMS))
    return made


def _cell(row: Row) -> str:
    """The operation that runs, where it is another one, and its backend."""
    return row.backend if row.implementation in (row.operation, "-") else f"{row.implementation} ({row.backend})"
