"""The environment variables of dispatch: `EASYTORCH_OPS` forces a choice, `EASYTORCH_CHECK` compares it.

Both are read at every call, so they can be changed in a running process; a function under `torch.compile` keeps what
they were when it was traced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.switches import switch

# os.environ.get of an absent variable raises and catches a KeyError (0.75 us of the 5 us of a dispatch), and a call
# looks up two; the dict behind it answers in 0.05 us.
TABLE: Any = getattr(os.environ, "_data", os.environ)
_encode: Callable[[str], Any] = getattr(os.environ, "encodekey", str)
VARIABLES = _OPS, _CHECK = _encode("EASYTORCH_OPS"), _encode("EASYTORCH_CHECK")


def forced_by_environment(operation: str) -> str | None:
    """The entry for `operation` (its primary name) in `EASYTORCH_OPS="attention=flash,rms_norm=native"`, if any."""
    if _OPS not in TABLE:
        return None
    return _parse(os.environ["EASYTORCH_OPS"]).get(operation)


def untouched() -> bool:
    """True where neither variable is set: nothing is forced, nothing is compared."""
    return _OPS not in TABLE and _CHECK not in TABLE


def checking() -> bool:
    """True under `EASYTORCH_CHECK=1`: every call is compared with its definition."""
    return _CHECK in TABLE and switch("EASYTORCH_CHECK")


@functools.lru_cache(maxsize=16)
def _parse(setting: str) -> dict[str, str]:
    forced: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        name, equals, choice = (part.strip() for part in entry.partition("="))
        if not (equals and name and choice):
            raise ValueError(
                f"EASYTORCH_OPS: {entry!r} is not of the form operation=implementation, as in attention=flash"
            )
        operation = OperationRegistry.get(name).primary_name()
        if operation in forced:
            raise ValueError(f"EASYTORCH_OPS names the operation {operation!r} twice: {setting!r}")
        forced[operation] = choice
    return forced
