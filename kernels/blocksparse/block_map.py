"""Which key blocks each query block needs, as tensors on the device: the loops of the Triton kernels.

Nothing here synchronizes with the device. https://arxiv.org/abs/2412.05496 (FlexAttention) has the same lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.blocksparse.structure import Structure

EMPTY, PARTIAL, FULL = 0, 1, 2


class Lists(NamedTuple):
    """For each block of one side, the blocks of the other: first those that need a mask, then those that do not.

    blocks: int32 (B or 1, blocks, width), partial and total: int32 (B or 1, blocks); blocks[..., :total] counts.
    """

    blocks: Tensor
    partial: Tensor
    total: Tensor


def states(
    structure: Structure, keys: int, block_m: int, block_n: int, *, mask: Tensor | None = None,
    query_ids: Tensor | None = None, key_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int8 (B or 1, query blocks, key blocks): EMPTY, PARTIAL or FULL, of blocks of block_m queries and block_n keys.

    mask: (B, H, T, S), any of them 1; a block's state is that of all heads together.
    """
    begin, end = structure.begin, structure.end
    nothing = torch.iinfo(torch.int32).max
    empty = begin >= end
    low = _blocks(torch.where(empty, nothing, begin), block_m, nothing).amin(2)[..., None]
    high = _blocks(torch.where(empty, 0, end), block_m, 0).amax(2)[..., None]
    start = torch.arange(0, keys, block_n, device=begin.device, dtype=torch.int32)
    stop = start + block_n
    some = (low < stop) & (high > start)
    all_begin = _blocks(torch.where(empty, nothing, begin), block_m, 0).amax(2)[..., None]
    all_end = _blocks(end, block_m, nothing).amin(2)[..., None]
    every = (all_begin <= start) & (all_end >= stop)  # an end is at most S: the last block is whole
    if query_ids is not None and key_ids is not None:
        q_low, q_high = (x[..., None] for x in _bounds(query_ids, block_m))
        k_low, k_high = (x[:, None] for x in _bounds(key_ids, block_n))
        some = some & (q_low <= k_high) & (q_high >= k_low)
        every = every & (q_low == k_high) & (q_high == k_low)
    if mask is not None:
        some = some & _of_blocks(mask.any(1), block_m, block_n, torch.any, False)
        every = every & _of_blocks(mask.all(1), block_m, block_n, torch.all, True)
    return some.to(torch.int8) + (some & every).to(torch.int8)


def lists_of(state: Tensor, width: int) -> Lists:
    """The lists of each row of `state` (B or 1, blocks, other blocks), of which at most `width` are not EMPTY."""
    order = torch.where(state == EMPTY, 3, state)
    index = order.argsort(dim=2, stable=True)[..., :width].to(torch.int32).contiguous()
    partial, total = (x.sum(2, dtype=torch.int32) for x in (state == PARTIAL, state != EMPTY))
    return Lists(index, partial, total)


def width_of(block: int, other: int, count: int, reach: tuple[int | None, int | None]) -> int:
    """At most how many of `count` blocks of `other` positions a block sees that reaches (down, up) from its own."""
    down, up = reach
    if down is None or up is None:
        return count
    return min(count, (block - 1 + down + up) // other + 2)


def _blocks(values: Tensor, size: int, fill: int | bool) -> Tensor:
    """(..., N) -> (..., blocks, size)."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % size), value=fill).unflatten(-1, (-1, size))


def _bounds(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest id of each block."""
    ids, limits = ids.to(torch.int64), torch.iinfo(torch.int64)
    return _blocks(ids, size, limits.max).amin(2), _blocks(ids, size, limits.min).amax(2)


def _of_blocks(seen: Tensor, block_m: int, block_n: int, reduce: Callable[..., Tensor], fill: bool) -> Tensor:
    """(B, T, S) -> (B, query blocks, key blocks), dimensions of 1 stay 1; `fill` pads the last blocks."""
    if seen.shape[1] != 1:
        seen = reduce(_blocks(seen.mT, block_m, fill), dim=3).mT
    return reduce(_blocks(seen, block_n, fill), dim=3) if seen.shape[2] != 1 else seen
