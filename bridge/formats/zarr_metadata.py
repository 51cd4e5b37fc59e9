"""The metadata of a zarr array: `.zarray` (version 2) or `zarr.json` (version 3), checked before anything is read.

Sources: the zarr v2 and v3 specifications, and tensorstore's `zarr` and `zarr3` drivers for the element types zarr
itself does not have (`bfloat16`, `float8_*`, `int4` under their own names).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from easytorch.bridge.core.tensor_info import MAX_RANK
from easytorch.bridge.dtypes import is_dtype

Driver = Literal["zarr", "zarr3"]
# The file that describes an array, beside its chunks, and tensorstore's driver for it.
DESCRIPTIONS: dict[str, Driver] = {".zarray": "zarr", "zarr.json": "zarr3"}
# numpy's one-letter kinds in version 2: `<f4`, `|b1`.
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True)
class ZarrArray:
    """An array as its metadata declares it; `chunks` is the shape of what one key of the store holds."""

    driver: Driver
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]

    @property
    def chunk_count(self) -> int:
        """How many chunks cover the shape."""
        count = 1
        for size, chunk in zip(self.shape, self.chunks, strict=True):
            count *= -(-size // chunk)
        return count


def parse(text: bytes, driver: Driver) -> ZarrArray:
    """The array that `text` describes; `ValueError` for anything that describes none."""
    content: Any = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    if driver == "zarr":
        chunks, dtype = content.get("chunks"), _version_2_dtype(content.get("dtype"))
    else:
        grid = content.get("chunk_grid")
        settings = grid.get("configuration") if isinstance(grid, dict) and grid.get("name") == "regular" else None
        chunks = settings.get("chunk_shape") if isinstance(settings, dict) else None
        dtype = content.get("data_type")
    if not isinstance(dtype, str) or not is_dtype(dtype):
        raise ValueError(f"has an element type that is not known here: {content.get('dtype', dtype)!r}")
    shape, steps = _sizes(content.get("shape"), 0), _sizes(chunks, 1)
    if shape is None or steps is None or len(shape) != len(steps):
        raise ValueError(f"has shape {content.get('shape')!r} in chunks {chunks!r}, which are not lists of sizes")
    return ZarrArray(driver, shape, dtype, steps)


def _version_2_dtype(code: object) -> str | None:
    """`bfloat16` for `bfloat16`, `float32` for `<f4` and `>f4`, `bool` for `|b1`."""
    if not isinstance(code, str) or code[:1] not in ("<", ">", "|"):
        return code if isinstance(code, str) else None
    if code[1:] == "b1":
        return "bool"
    width = code[2:]
    return f"{_KINDS.get(code[1], '?')}{8 * int(width)}" if width in ("1", "2", "4", "8", "16") else None


def _sizes(values: object, least: int) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > MAX_RANK:
        return None
    return tuple(values) if all(type(value) is int and least <= value < 2**63 for value in values) else None
