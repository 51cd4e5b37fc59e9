"""Products of decays within a chunk, from their logarithms: exponentials of sums, never quotients of products.

A sum over i..j is the difference of two running sums. Those are kept in float64: after a few hundred strong decays a
float32 running sum is too coarse for the difference of two neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Logarithms whose exponential is 0 in a dtype: one below counts as it, since minus infinity less itself is NaN.
_NOTHING = {torch.float32: -110.0, torch.float64: -760.0}


class Decay(NamedTuple):
    """between (..., L, L): from after token j to token i, 0 above the diagonal and 1 on it; before (..., L): from the
    start of the chunk to token i, its own included; after (..., L): from after token j to the end; whole (...,)."""

    between: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    whole: torch.Tensor


def of_chunk(log: torch.Tensor, number: torch.Tensor | None, wide: torch.dtype) -> Decay:
    """log (..., L): the logarithms of each token's decay, at most 0, -> their products, in the dtype `wide`.

    number (..., L), where there are documents: that of each token, 0 for the one the chunk's first state belongs to; a
    product across two of them is 0.
    """
    total = log.to(torch.float64).clamp(min=_NOTHING[wide]).cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    length = log.shape[-1]
    apart = torch.ones(length, length, dtype=torch.bool, device=log.device).triu(1)
    after = (total[..., -1:] - total).to(wide).exp()
    before = total.to(wide).exp()
    if number is not None:
        apart = apart | (number.unsqueeze(-1) != number.unsqueeze(-2))
        after = after.masked_fill(number != number[..., -1:], 0.0)
        before = before.masked_fill(number != 0, 0.0)
    # masked before the exponential: above the diagonal it would overflow
    return Decay(between.to(wide).masked_fill(apart, float("-inf")).exp(), before, after, before[..., -1])
