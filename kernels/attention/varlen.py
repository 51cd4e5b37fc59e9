"""Attention over sequences of different lengths packed one after another, as flash-attn's `flash_attn_varlen_func`.

Sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] .. cu_seqlens_k[b + 1],
and is a call of its own by contract.py: causal and window are aligned to its own last query and key. Any attention that
supports segment ids can compute it:

    packed    queries and keys have the same lengths: one row of tokens, a segment for each sequence
    batched   one row for each sequence, its tokens at the end, the slots before them in no segment
    aligned   one row; a sequence takes as many slots as the longer of its queries and keys, both at the end of them

Of the layouts that are exact the one with the fewest scores is used; the choice needs only shapes and maximum lengths.
Tokens beyond the last sequence give zeros. Dropout is a function of the positions in the packed tokens (dropout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention import blocked
from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.arguments import check_integer, check_tensors

Attend = Callable[..., Tensor]


def attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
    **features: Any,
) -> Tensor:
    """(1, T, H, D), (1, S, K, D), (1, S, K, Dv) -> (1, T, H, Dv); all without the leading 1 are taken too.

    attend: the attention to call, with segment ids; blocked.py computes the sequences one by one.
    cu_seqlens_*: integers (sequences + 1,), from 0, not decreasing. max_seqlen_*: at least the longest length; None
    finds it. features: softcap, sinks, softmax_scale.
    Raises `ValueError` for shapes that do not fit and, where the numbers are on the host, lengths that do not.
    """
    packed = query.dim() == 3
    if packed:
        query, key, value = query[None], key[None], value[None]
    lengths = _check(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, features)
    tokens, keys, device = query.shape[1], key.shape[1], query.device
    sequences = cu_seqlens_q.shape[0] - 1
    ends_q, ends_k = (x.to(device, torch.int64).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    features |= {"causal": causal, "sliding_window": sliding_window}
    alike = tokens == keys and (cu_seqlens_q is cu_seqlens_k or (lengths is not None and lengths[0] == lengths[1]))
    if lengths is not None:
        max_seqlen_q, max_seqlen_k = (max(x, default=0) for x in lengths)
    batched = sequences * (tokens if max_seqlen_q is None else max_seqlen_q) * (max_seqlen_k or keys)
    slots = tokens + keys
    if lengths is not None:
        slots = sum(map(max, *lengths))
    if dropout_prob > 0.0:
        features |= {"dropout_prob": dropout_prob, "seed": draw_seed() if seed is None else seed}
    if attend is blocked.attention and lengths is not None and dropout_prob == 0.0:
        output = _one_by_one(query, key, value, lengths, features)
    elif alike and (dropout_prob > 0.0 or tokens * keys <= batched):
        sequence, kept = _sequence_of(ends_q, tokens)
        # tokens beyond the last sequence: a segment that no key has
        row_ids, column_ids = (torch.where(kept, sequence, hidden)[None] for hidden in (-1, -2))
        output = attend(query, key, value, query_segment_ids=row_ids, key_segment_ids=column_ids, **features)
    elif dropout_prob > 0.0:
        features |= {"causal": False, "sliding_window": None, "mask": _visible(ends_q, ends_k, tokens, keys, features)}
        output = blocked.attention(query, key, value, **features)
    else:
        if batched <= slots * slots and max_seqlen_q is not None and max_seqlen_k is not None:
            rows, columns = _batched(ends_q, max_seqlen_q, tokens), _batched(ends_k, max_seqlen_k, keys)
        else:
            lasts = torch.maximum(ends_q.diff(), ends_k.diff()).cumsum(0)
            rows, columns = _aligned(ends_q, lasts, slots, tokens), _aligned(ends_k, lasts, slots, keys)
        output = _through(attend, query, key, value, rows, columns, features)
    return output[0] if packed else output


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[list[int], list[int]], features: dict[str, Any]
) -> Tensor:
    """The definition: a call for each sequence."""
    parts, row, column = [], 0, 0
    for rows, columns in zip(*lengths, strict=True):
        own = (x[:, column : column + columns] for x in (key, value))
        parts.append(blocked.attention(query[:, row : row + rows], *own, **features))
        row, column = row + rows, column + columns
    parts.append(query.new_zeros(1, query.shape[1] - row, query.shape[2], value.shape[3]))
    return torch.cat(parts, dim=1)


class _Slots(NamedTuple):
    """token: the token in each slot (rows, slots), with `filled` False where there is none; ids: its sequence, or -1.

    slot: where each token is among all slots (tokens,), with `kept` False beyond the last sequence.
    """

    token: Tensor
    filled: Tensor
    ids: Tensor
    slot: Tensor
    kept: Tensor


def _through(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, rows: _Slots, columns: _Slots, features: dict[str, Any]
) -> Tensor:
    # an empty key slot must not be in the same segment as an empty query slot
    key_ids = torch.where(columns.filled, columns.ids, -2)
    output = attend(
        _taken(query, rows), _taken(key, columns), _taken(value, columns), query_segment_ids=rows.ids,
        key_segment_ids=key_ids, **features,
    )  # fmt: skip
    if output.shape[0] * output.shape[1] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    return torch.where(rows.kept[:, None, None], output.flatten(0, 1)[rows.slot], 0.0)[None]


def _taken(x: Tensor, slots: _Slots) -> Tensor:
    """(1, tokens, H, N) -> (rows, slots, H, N); an empty slot holds some token, which its id hides."""
    if x.shape[1] == 0:
        return x.new_zeros(*slots.token.shape, *x.shape[2:])
    return x[0][slots.token]


def _batched(ends: Tensor, longest: int, tokens: int) -> _Slots:
    token = ends[1:, None] - longest + torch.arange(longest, device=ends.device)
    filled = token >= ends[:-1, None]
    sequence, kept = _sequence_of(ends, tokens)
    slot = (sequence + 1) * longest - (ends[1:][sequence] - torch.arange(tokens, device=ends.device))
    return _slots(token, filled, torch.zeros_like(token), slot, kept, tokens)


def _aligned(ends: Tensor, lasts: Tensor, slots: int, tokens: int) -> _Slots:
    """lasts: one beyond the last slot of each sequence."""
    place = torch.arange(slots, device=ends.device)
    owner = torch.searchsorted(lasts, place, right=True).clamp(max=lasts.shape[0] - 1)
    token = ends[1:][owner] - (lasts[owner] - place)
    filled = (token >= ends[:-1][owner]) & (place < lasts[-1])
    sequence, kept = _sequence_of(ends, tokens)
    slot = lasts[sequence] - (ends[1:][sequence] - torch.arange(tokens, device=ends.device))
    return _slots(token[None], filled[None], owner[None], slot, kept, tokens)


def _slots(token: Tensor, filled: Tensor, ids: Tensor, slot: Tensor, kept: Tensor, tokens: int) -> _Slots:
    last = max(token.numel() - 1, 0)
    return _Slots(token.clamp(0, max(tokens - 1, 0)), filled, torch.where(filled, ids, -1), slot.clamp(0, last), kept)


def _sequence_of(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token, the last one for tokens beyond it, and whether it is in one."""
    place = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends[1:], place, right=True)
    return sequence.clamp(max=max(ends.shape[0] - 2, 0)), place < ends[-1]


def _visible(ends_q: Tensor, ends_k: Tensor, tokens: int, keys: int, features: dict[str, Any]) -> Tensor:
    """Boolean (T, S)."""
    (rows, row_kept), (columns, column_kept) = _sequence_of(ends_q, tokens), _sequence_of(ends_k, keys)
    seen = (rows[:, None] == columns) & row_kept[:, None] & column_kept
    row = torch.arange(tokens, device=rows.device) - ends_q[1:][rows]
    column = torch.arange(keys, device=rows.device) - ends_k[1:][columns]
    offset = column - row[:, None]
    left, right = band_of(features["causal"], features["sliding_window"])
    if left is not None:
        seen.logical_and_(offset >= -left)
    if right is not None:
        seen.logical_and_(offset <= right)
    return seen


def _check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None, features: dict[str, Any],
) -> tuple[list[int], list[int]] | None:  # fmt: skip
    """The lengths of queries and keys where they are known to the host; an error for what does not fit."""
    check_tensors("attention", query=query, key=key, value=value)
    for name in ("mask", "bias", "query_segment_ids", "key_segment_ids"):
        if features.pop(name, None) is not None:
            raise ValueError(f"attention: cu_seqlens_q and cu_seqlens_k already say who sees whom: {name} must be None")
    if any(x.dim() != 4 or x.shape[0] != 1 for x in (query, key, value)):
        raise ValueError(
            f"attention: with cu_seqlens the tokens are packed in one row, (1, tokens, heads, head_dim) or (tokens, "
            f"heads, head_dim); got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensors("attention", **{name: ends})
        if ends is None or ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64) or ends.shape[0] < 2:
            given = ends if ends is None else f"{tuple(ends.shape)} of {ends.dtype}"
            raise ValueError(
                f"attention: {name} must be an integer tensor (sequences + 1,) of at least one sequence, got {given}"
            )
        if ends.device.type == "meta" and query.device.type != "meta":
            raise ValueError(f"attention: {name} is on meta, which holds no numbers; move it to {query.device}")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_integer("attention", name, longest)
        if isinstance(longest, int) and longest < 0:
            raise ValueError(f"attention: {name} must not be negative, got {longest}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"attention: cu_seqlens_q has {cu_seqlens_q.shape[0] - 1} sequences, cu_seqlens_k "
            f"{cu_seqlens_k.shape[0] - 1}; give both, of one length"
        )
    if torch.compiler.is_compiling() or cu_seqlens_q.device.type != "cpu" or cu_seqlens_k.device.type != "cpu":
        return None
    lengths = []
    for side, stops, tokens, longest in (
        ("q", cu_seqlens_q.tolist(), query.shape[1], max_seqlen_q),
        ("k", cu_seqlens_k.tolist(), key.shape[1], max_seqlen_k),
    ):
        found = [stop - start for start, stop in pairwise(stops)]
        if stops[0] != 0 or stops[-1] > tokens or min(found, default=0) < 0:
            raise ValueError(
                f"attention: cu_seqlens_{side} must rise from 0 to at most the {tokens} tokens, got {stops}"
            )
        if longest is not None and longest < max(found, default=0):
            raise ValueError(
                f"attention: max_seqlen_{side} is {longest}, but the longest of cu_seqlens_{side} is {max(found)}"
            )
        lengths.append(found)
    return lengths[0], lengths[1]
