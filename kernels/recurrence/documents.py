"""Documents packed into one sequence: a state does not pass from one to the next.

The state an operation starts with belongs to the document of the first token, the one it ends with to that of the last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def first_tokens(segment_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T), True where a token begins a document: its id is not that of the token before it."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))


def numbers(segment_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T) int64: which document of the sequence a token belongs to, counted from 0."""
    return first_tokens(segment_ids).cumsum(1)
