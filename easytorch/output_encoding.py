"""Escapes for characters that the terminal's encoding lacks."""

from __future__ import annotations

import io
import sys


def escape_unencodable() -> None:
    """Names of files in letters that stdout cannot encode are escaped, as Python does on stderr: that a finished
    conversion cannot be printed does not make it fail. What the user or Python chose besides "strict" stays."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
