"""The keys that each query may see, as an interval: the representation of structure for every kernel here.

Causal, sliding window, chunks and prefix together leave each query one interval [begin, end) of keys, and so do the
segment ids of contiguous documents. What intervals cannot express (a mask, interleaved segments) a kernel applies
inside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from easytorch.kernels.attention.contract import Window, window_of


class Structure(NamedTuple):
    """begin, end: int32 (B or 1, T); query i sees no key outside [begin, end). Both lie in 0..S.

    left, right: a band known without data that holds all of them: i + S - T - left <= j <= i + S - T + right.
    """

    begin: torch.Tensor
    end: torch.Tensor
    left: int | None
    right: int | None


class Rule(NamedTuple):
    """The arguments of a call that give its structure. prefix: None, an int, or integers (B,); in jax, where these
    are a separate array, True."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk_size: int | None = None
    prefix: Any = None

    def of(self, own: Any, keys: int, prefix: Any) -> tuple[Any, Any]:
        """begin and end of the queries aligned with the keys `own`, of torch, numpy or jax, (..., T)."""
        return intervals(own, keys, self.causal, self.left, self.right, self.chunk_size, prefix)

    def structure(self, length: int, keys: int, device: torch.device) -> Structure:
        """The structure of a call with `length` queries and `keys` keys, its segments and mask not counted."""
        own = torch.arange(length, device=device)[None] + (keys - length)
        prefix = self.prefix
        if isinstance(prefix, torch.Tensor):
            prefix = prefix.to(device).reshape(-1, 1)
        begin, end = self.of(own, keys, prefix)
        band = band_around(self.causal, self.left, self.right, self.chunk_size, prefix is not None)
        return Structure(begin.to(torch.int32), end.to(torch.int32), *band)


def structure_of(
    length: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    prefix_length: int | torch.Tensor | None = None,
) -> Structure:
    """`Rule.structure` of an attention's arguments."""
    return Rule(causal, *window_of(sliding_window), chunk_size, prefix_length).structure(length, keys, device)


def intervals(
    own: Any, keys: int, causal: bool, left: int | None, right: int | None, chunk_size: int | None, prefix: Any
) -> tuple[Any, Any]:
    """begin and end for queries aligned with the keys `own`: an integer array (..., T) of torch, numpy or jax.

    prefix: None, an int or an array that broadcasts against `own`. Neither decreases with `own`.
    """
    if causal and prefix is not None:
        own = own + prefix * 0  # an interval for each prefix
    begin, end = own * 0, own * 0 + keys
    if causal:
        end = own + 1 if prefix is None else (own + 1).clip(prefix)
    if right is not None:
        end = end.clip(None, own + right + 1)
    if left is not None:
        begin = own - left
    if chunk_size is not None:
        first = own // chunk_size * chunk_size
        begin = begin.clip(first)
        end = end.clip(None, first + chunk_size)
    return begin.clip(0, keys), end.clip(0, keys)


def band_around(causal: bool, left: int | None, right: int | None, chunk_size: int | None, prefixed: bool) -> Window:
    """(left, right), None for unbounded: the narrowest band that holds every interval whatever the prefix is."""
    rights = [side for side in (right, None if chunk_size is None else chunk_size - 1) if side is not None]
    if causal and not prefixed:
        rights.append(0)
    lefts = [side for side in (left, None if chunk_size is None else chunk_size - 1) if side is not None]
    return min(lefts, default=None), min(rights, default=None)


def within_segments(
    structure: Structure, query_ids: torch.Tensor, key_ids: torch.Tensor
) -> tuple[Structure, torch.Tensor]:
    """The structure narrowed to the keys of each query's segment, and whether that says all about segments: bool ().

    query_ids (B, T), key_ids (B, S). It says all where the keys of each segment that is asked for lie side by side.
    """
    if key_ids.shape[1] == 0:
        return structure, torch.ones((), dtype=torch.bool, device=key_ids.device)
    ordered, place = key_ids.long().contiguous().sort(dim=1, stable=True)
    asked = query_ids.long().contiguous()
    first = torch.searchsorted(ordered, asked)
    stop = torch.searchsorted(ordered, asked, right=True)
    count = stop - first
    last = place.shape[1] - 1
    begin = torch.where(count > 0, place.gather(1, first.clip(max=last)), 0)
    end = torch.where(count > 0, place.gather(1, (stop - 1).clip(min=0)) + 1, 0)
    narrowed = structure._replace(
        begin=structure.begin.maximum(begin.to(torch.int32)), end=structure.end.minimum(end.to(torch.int32))
    )
    return narrowed, (end - begin == count).all()
