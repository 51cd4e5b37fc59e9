"""Documents packed into one sequence: a state does not pass from one to the next.

The initial state belongs to the document of the first token, the final state to that of the last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def first_tokens(segment_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T), True where a token begins a document: its id differs from the previous token's."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))


def numbers(segment_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T) int64: which document of the sequence a token belongs to, counted from 0."""
    return first_tokens(segment_ids).cumsum(1)


def of_chunks(number: torch.Tensor | None, length: int, chunk: int) -> Iterator[torch.Tensor | None]:
    """`numbers` (B, T) split into chunks, in each counted from the document of the chunk's initial state."""
    for start in range(0, length, chunk):
        if number is None:
            yield None
        else:
            own = number[:, start : start + chunk]
            yield own - number[:, start - 1 : start] if start else own
