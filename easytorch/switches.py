"""Environment variables that switch something on or off: one way to read them all."""

from __future__ import annotations

import functools
import os

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")


def switch(name: str) -> bool:
    """True where the environment variable `name` says so; absent is off. `ValueError` for what is neither."""
    return parse(name, os.environ.get(name, ""))


@functools.lru_cache(maxsize=16)
def parse(name: str, value: str) -> bool:
    """The meaning of a switch's value, ignoring case and surrounding blanks."""
    word = value.strip().lower()
    if word not in ON and word not in OFF:
        raise ValueError(
            f"{name}={value!r} is neither on ({', '.join(ON)}) nor off ({', '.join(filter(None, OFF))}, or empty)"
        )
    return word in ON
