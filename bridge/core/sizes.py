"""Sizes as people write them: `5GB`, `512MiB`, `100`."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def parse_size(text: str | int) -> int:
    """Bytes in `text`; `ValueError` for what is not a positive number with a unit from KB to TiB, or none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(text).upper())
    unit = None if found is None else _UNITS.get("" if found[2] == "B" else found[2])
    size = 0 if found is None or unit is None else int(float(found[1]) * unit)
    if size <= 0:
        raise ValueError(
            f"{text!r} is not a size; write a number and KB, MB, GB, TB, KiB, MiB, GiB or TiB, as in '5GB'"
        )
    return size


def human_size(count: float) -> str:
    """`1.2 GB`: three digits and a decimal unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
