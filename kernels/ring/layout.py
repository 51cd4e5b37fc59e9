"""Which positions of a sequence each rank of a ring holds.

"contiguous": rank r of n holds the r-th of n equal parts. "zigzag": the sequence is split into 2n chunks and rank r
holds the chunks r and 2n - 1 - r, one early and one late, so that under a causal mask every rank has the same work
(Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LAYOUTS = ("contiguous", "zigzag")


def chunks_of(layout: str, rank: int, size: int) -> tuple[int, ...]:
    """The chunks rank `rank` of `size` holds, in the order it holds them."""
    if layout not in LAYOUTS:
        raise ValueError(f"the layout of a sharded sequence is one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in 0..{size - 1} for a ring of {size}, got {rank}")
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def shard(x: torch.Tensor, rank: int, size: int, dim: int = 1, layout: str = "contiguous") -> torch.Tensor:
    """The shard of `x` on rank `rank` of `size`; dimension `dim` of `x` is the whole sequence."""
    chunks = chunks_of(layout, rank, size)
    count = size * len(chunks)
    if x.shape[dim] % count:
        raise ValueError(
            f"a sequence of {x.shape[dim]} cannot be cut into the {count} equal chunks of a {layout} ring of {size}: "
            f"pad it to a multiple of {count}"
        )
    length = x.shape[dim] // count
    return torch.cat([x.narrow(dim, chunk * length, length) for chunk in chunks], dim)


def unshard(shards: Sequence[torch.Tensor], dim: int = 1, layout: str = "contiguous") -> torch.Tensor:
    """The inverse of `shard`: the whole sequence from the shards of all ranks, in their order."""
    if len({tensor.shape[dim] for tensor in shards}) != 1:
        raise ValueError(f"unshard takes shards of one length, got {[tensor.shape[dim] for tensor in shards]}")
    size = len(shards)
    parts: dict[int, torch.Tensor] = {}
    for rank, tensor in enumerate(shards):
        chunks = chunks_of(layout, rank, size)
        if tensor.shape[dim] % len(chunks):
            raise ValueError(f"a {layout} shard has {len(chunks)} equal chunks, got a length of {tensor.shape[dim]}")
        parts.update(zip(chunks, tensor.chunk(len(chunks), dim), strict=True))
    return torch.cat([parts[chunk] for chunk in sorted(parts)], dim)


def zigzag_shard(x: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
    """The chunks `rank` and 2 * size - 1 - `rank` of the 2 * size of `x` along `dim`."""
    return shard(x, rank, size, dim, "zigzag")


def zigzag_unshard(shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The whole sequence from the zigzag shards of all ranks, in their order."""
    return unshard(shards, dim, "zigzag")


def position_ids(
    length: int, rank: int, size: int, layout: str = "contiguous", device: torch.device | str | None = None
) -> torch.Tensor:
    """int64 (length,): where the `length` tokens that rank `rank` holds stand in the sequence of length * size.

    Rotary embeddings take these.
    """
    return shard(torch.arange(length * size, device=device), rank, size, 0, layout)
