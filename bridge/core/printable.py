"""Text that a checkpoint brought, made safe to print: a terminal obeys escape sequences in a tensor's name."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with invisible characters (control, direction and line marks, lone surrogates) escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
