"""decay.py in Triton. Imports Triton: import it from kernels only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decays(log, number, carried):
    """log (L,) float32 -> between (L, L), before, after (L,), whole, as `decay.Decay` has them.

    number (L,), or None: each token's document, in order; carried: that of the state before the chunk. A sum is kept as
    a multiple of 1/256, whose sums are exact, plus a small remainder, in place of float64.
    """
    log = tl.maximum(log, -128.0)  # exp(-128) is 0 in float32
    coarse = tl.floor(log * 256.0) * 0.00390625
    fine = log - coarse
    coarse_total = tl.cumsum(coarse, 0)
    fine_total = tl.cumsum(fine, 0)
    sums = (coarse_total[:, None] - coarse_total[None, :]) + (fine_total[:, None] - fine_total[None, :])
    index = tl.arange(0, log.shape[0])
    seen = index[:, None] >= index[None, :]
    before = tl.exp(coarse_total + fine_total)
    all_coarse = tl.sum(coarse, 0)
    all_fine = tl.sum(fine, 0)
    after = tl.exp((all_coarse - coarse_total) + (all_fine - fine_total))
    whole = tl.exp(all_coarse + all_fine)
    if number is not None:
        last = tl.max(number, 0)
        seen = seen & (number[:, None] == number[None, :])
        before = tl.where(number == carried, before, 0.0)
        after = tl.where(number == last, after, 0.0)
        whole = tl.where(last == carried, whole, 0.0)
    between = tl.exp(tl.where(seen, sums, float("-inf")))
    return between, before, after, whole
