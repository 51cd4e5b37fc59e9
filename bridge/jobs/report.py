"""The report of a conversion."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion. `kept`: torch tensors stored beside a tree; `tied`: repeats of tied weights left out.

    `verified`: every tensor was read back. `outputs_difference`: the largest difference between torch's and jax's
    outputs, relative to the largest output; None where they were not compared.
    """

    source: str
    destination: str
    source_format: str
    source_scheme: str
    target_format: str
    target_scheme: str
    architecture: str | None
    tensors: int
    bytes: int
    files: tuple[str, ...]
    kept: tuple[str, ...]
    tied: tuple[str, ...]
    notes: tuple[str, ...]
    verified: bool
    outputs_difference: float | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)
