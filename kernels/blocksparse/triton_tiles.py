"""A tile of scores under a block map, for the forward and backward kernels; beside attention/triton_flash_tiles.py.

A block map (block_map.py) names, for each block of one side, the blocks of the other that are needed. Partial
blocks apply the intervals of structure.py, mask and segments; full ones need none of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.attention.triton_flash_tiles import score_tile


@triton.jit
def seen_scores(
    products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, key_ids, begin, end,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """score_tile's (scores, tanh of the soft cap), -inf outside [begin, end) where PARTIAL."""
    if PARTIAL:
        scores, capped = score_tile(
            products, rows, columns, T, S, scale, cap, bias_pointers, mask_pointers, query_ids, key_ids, None, None,
            False,
        )  # fmt: skip
        scores = tl.where((columns >= begin) & (columns < end), scores, float("-inf"))
    else:
        scores, capped = score_tile(
            products, rows, columns, T, S, scale, cap, bias_pointers, None, None, None, None, None, False
        )
    return scores, capped
