"""`--help` at any terminal width: typer's table where it fits, else plain lines, so that no option is truncated."""

from __future__ import annotations

import shutil
from typing import Any

from typer.core import TyperCommand

# Columns of the table beside the names: what they take (`<int range> [x>=1]`), their help, and the borders.
_BESIDE = 64
# The narrowest that lines are wrapped to.
_NARROWEST = 30


class FullNamesMixin:
    """For a command of typer, whose table truncates names in a narrow terminal."""

    rich_markup_mode: Any

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        params = ctx.command.get_params(ctx)
        names = [name for one in params for name in (*one.opts, *one.secondary_opts)]
        if columns < max(map(len, names), default=0) + _BESIDE:
            self.rich_markup_mode = None  # click's own help
            formatter.width = max(_NARROWEST, columns - 2)
        super().format_help(ctx, formatter)  # type: ignore[misc]


class FullNamesCommand(FullNamesMixin, TyperCommand):
    """A typer command with `FullNamesMixin`."""
