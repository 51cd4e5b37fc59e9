"""What a conversion says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. `kept` are torch tensors stored beside a tree, `tied` the repeats left out.

    `verified`: every tensor was read back. `outputs_difference`: what torch and jax computed from the two sides, the
    largest difference relative to the largest output; None where that was not asked for or could not be done.
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
