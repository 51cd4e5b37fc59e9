"""Products of decays within a chunk, as exponentials of sums of their logarithms, never as quotients of products.

A sum over i..j is the difference of two running sums. Those are float64: after a few hundred strong decays the
difference of two neighbouring float32 sums has no digits left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Logarithms whose exponential is 0 in the dtype: smaller ones are clamped to it, as -inf - -inf is NaN.
_NOTHING = {torch.float32: -110.0, torch.float64: -760.0}


class Decay(NamedTuple):
    """between (..., L, L): decay of tokens j+1..i, 0 above the diagonal and 1 on it; before (..., L): of the chunk's
    start to token i inclusive; after (..., L): of tokens j+1 to the end; whole (...,): of all tokens."""

    between: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    whole: torch.Tensor


def running_sums(log: torch.Tensor, wide: torch.dtype, dim: int) -> torch.Tensor:
    """The sums of log, at most 0, up to each token along `dim`, float64; what exp makes 0 in `wide` is clamped."""
    return log.to(torch.float64).clamp(min=_NOTHING[wide]).cumsum(dim)


def of_chunk(log: torch.Tensor, number: torch.Tensor | None, wide: torch.dtype) -> Decay:
    """log (..., L), the logarithm of each token's decay, at most 0 -> the products, in the dtype `wide`.

    number (..., L), for packed documents: each token's document, 0 for the one that the chunk's initial state belongs
    to; a product across two documents is 0.
    """
    total = running_sums(log, wide, -1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    length = log.shape[-1]
    apart = torch.ones(length, length, dtype=torch.bool, device=log.device).triu(1)
    after = (total[..., -1:] - total).to(wide).exp()
    before = total.to(wide).exp()
    if number is not None:
        apart = apart | (number.unsqueeze(-1) != number.unsqueeze(-2))
        after = after.masked_fill(number != number[..., -1:], 0.0)
        before = before.masked_fill(number != 0, 0.0)
    # masked before exp, which would overflow above the diagonal
    return Decay(between.to(wide).masked_fill(apart, float("-inf")).exp(), before, after, before[..., -1])
