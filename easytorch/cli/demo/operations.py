"""Stage 5: which implementation each operation picks on each platform, and why."""

from __future__ import annotations

from easytorch.cli.demo.stage import Demo
from easytorch.cli.env import operations_table


def run(demo: Demo) -> None:
    from easytorch.operations.table import choices

    demo.console.print(operations_table([choice._asdict() for choice in choices()]))
