"""The version of the package that the bridge is a part of."""

from __future__ import annotations

import sys


def version() -> str:
    """As the package states it; asked when called, since the bridge imports nothing outside itself."""
    stated: str = sys.modules[__name__.partition(".")[0]].__version__
    return stated
