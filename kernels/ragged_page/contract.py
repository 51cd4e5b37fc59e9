"""The arguments of attention over a paged key/value cache, checked and read.

    ragged_page_attention(query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs=None, *,
                          causal, sliding_window, softcap, sinks, softmax_scale)

Legend: N tokens of all sequences, one after the other; B sequences; P pages of `page_size` tokens; H query heads, K
key/value heads (H a multiple of K); D and Dv head_dim of query and key, and of value.

    query            (N, H, D)
    key_pages        (P, page_size, K, D)        value_pages (P, page_size, K, Dv)
    context_lens     (B,) integer                keys of each sequence, those of its query tokens included
    block_tables     (B, max_pages) integer      key j of sequence b lies in page block_tables[b, j // page_size]
    query_start_loc  (B + 1,) integer            sequence b owns the query rows [start[b], start[b + 1]), start[0] = 0
    num_seqs         int, integer tensor () or (1,), or None for B: how many sequences there are; what the other
                     tensors say of the rest is not read

Each sequence is attention (kernels/attention/contract.py) of its query rows over its keys, with the last query aligned
to the last key: prefill, chunked prefill and decode are one thing. Rows that no sequence owns give zeros. A page that
the sliding window hides from all queries of its sequence is not read. Paged attention: https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import band_of, check_sinks, check_softcap
from easytorch.kernels.interop.arguments import check_dense, check_integer, check_tensors, floating

INDEX_DTYPES = (torch.int32, torch.int64)

Window = int | tuple[int | None, int | None] | None


class Sequence(NamedTuple):
    """One sequence: query rows [first, last), and its last `keys` keys, starting with those of page `page`.

    row: its row of block_tables. pages: how many columns of that row, from `page` on, hold the keys.
    """

    row: int
    first: int
    last: int
    page: int
    pages: int
    keys: int


def resolve(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    **features: Any,
) -> AttentionCall:
    """The call as one record, or an error where shapes, dtypes or devices do not fit; reads no tensor's values."""
    check_tensors(
        "ragged_page", query=query, key_pages=key_pages, value_pages=value_pages, context_lens=context_lens,
        block_tables=block_tables, query_start_loc=query_start_loc, sinks=features.get("sinks"),
    )  # fmt: skip
    if query.dim() != 3 or key_pages.dim() != 4 or value_pages.dim() != 4:
        raise ValueError(
            f"ragged_page: expected query (tokens, H, D), key_pages (P, page_size, K, D) and value_pages "
            f"(P, page_size, K, Dv), got {tuple(query.shape)}, {tuple(key_pages.shape)}, {tuple(value_pages.shape)}"
        )
    heads, kv_heads = query.shape[1], key_pages.shape[2]
    if key_pages.shape[:3] != value_pages.shape[:3] or key_pages.shape[3] != query.shape[2]:
        raise ValueError(
            f"ragged_page: pages, page_size, key/value heads or head_dim differ: query {tuple(query.shape)}, key_pages "
            f"{tuple(key_pages.shape)}, value_pages {tuple(value_pages.shape)}"
        )
    if key_pages.shape[1] == 0:
        raise ValueError("ragged_page: page_size must be at least 1")
    if heads == 0:
        raise ValueError(f"ragged_page: the query {tuple(query.shape)} has no heads")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"ragged_page: the {heads} query heads are not a multiple of the {kv_heads} key/value heads")
    if not query.dtype == key_pages.dtype == value_pages.dtype or not floating(query):
        raise ValueError(
            f"ragged_page: query, key_pages and value_pages must be floating, of one dtype, got {query.dtype}, "
            f"{key_pages.dtype}, {value_pages.dtype}"
        )
    if query.shape[2] == 0:
        raise ValueError(f"ragged_page: head_dim must be at least 1, got query {tuple(query.shape)}")
    check_tables(context_lens, block_tables, query_start_loc, num_seqs)
    return resolve_features(heads, query.shape[2] ** -0.5, **features)


def resolve_features(
    heads: int, scale: float, *, causal: bool = True, sliding_window: Window = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, softmax_scale: float | None = None,
) -> AttentionCall:  # fmt: skip
    """`resolve` for the features alone. scale: used where the call gives none."""
    check_tensors("ragged_page", sinks=sinks)
    check_dense("ragged_page", sinks=sinks)
    check_sinks("ragged_page", sinks, heads)
    check_softcap("ragged_page", softcap)
    left, right = band_of(causal, sliding_window)  # raises for an empty window
    scale = scale if softmax_scale is None else softmax_scale
    return AttentionCall(sinks=sinks, scale=scale, left=left, right=right, softcap=softcap)


# The features of attention that kernels over pages carry; every other is refused for them.
FEATURES = frozenset(inspect.getfullargspec(resolve_features).kwonlyargs)


def check_tables(
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None,
) -> None:
    """`resolve` for the integer tensors alone: checks them."""
    given = num_seqs if isinstance(num_seqs, torch.Tensor) else None
    check_tensors(
        "ragged_page", context_lens=context_lens, block_tables=block_tables, query_start_loc=query_start_loc,
        num_seqs=given,
    )  # fmt: skip
    if given is None:
        check_integer("ragged_page", "num_seqs", num_seqs)
    batch = context_lens.shape[0] if context_lens.dim() == 1 else -1
    if batch < 0 or block_tables.dim() != 2 or block_tables.shape[0] != batch or query_start_loc.shape != (batch + 1,):
        raise ValueError(
            f"ragged_page: expected context_lens (B,), block_tables (B, max_pages) and query_start_loc (B + 1,), got "
            f"{tuple(context_lens.shape)}, {tuple(block_tables.shape)}, {tuple(query_start_loc.shape)}"
        )
    tables = {"context_lens": context_lens, "block_tables": block_tables, "query_start_loc": query_start_loc}
    if isinstance(num_seqs, torch.Tensor):
        tables["num_seqs"] = num_seqs
        if num_seqs.numel() != 1:
            raise ValueError(f"ragged_page: num_seqs must hold one number, got shape {tuple(num_seqs.shape)}")
    elif num_seqs is not None and not 0 <= num_seqs <= batch:
        raise ValueError(f"ragged_page: num_seqs must be in 0..{batch}, the sequences there are, got {num_seqs}")
    for name, tensor in tables.items():
        if tensor.dtype not in INDEX_DTYPES:
            raise ValueError(f"ragged_page: {name} must be int32 or int64, got {tensor.dtype}")


def cut_to(
    num_seqs: int | torch.Tensor | None,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """context_lens, block_tables, query_start_loc, num_seqs: an int num_seqs is applied by slicing, and becomes
    None."""
    if num_seqs is None or isinstance(num_seqs, torch.Tensor):
        return context_lens, block_tables, query_start_loc, num_seqs
    return context_lens[:num_seqs], block_tables[:num_seqs], query_start_loc[: num_seqs + 1], None


def read_sequences(
    tokens: int,
    page_count: int,
    page_size: int,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None,
    left: int | None,
) -> list[Sequence]:
    """The sequences that own query rows, in order, their numbers checked; `left` is that of the band (`band_of`).

    Raises `ValueError` for starts that do not begin at 0, decrease or pass the tokens, a context shorter than its
    queries or longer than its row of block_tables, and a page in use that does not exist. Synchronizes with the
    tensors' device.
    """
    count = len(context_lens) if num_seqs is None else int(num_seqs)
    if not 0 <= count <= len(context_lens):
        raise ValueError(
            f"ragged_page: num_seqs must be in 0..{len(context_lens)}, the sequences there are, got {count}"
        )
    starts, contexts = query_start_loc[: count + 1].tolist(), context_lens[:count].tolist()
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)) or starts[-1] > tokens:
        raise ValueError(f"ragged_page: query_start_loc must begin at 0, never decrease and end within the {tokens} "
                         f"tokens of the query, got {_brief(starts)}")  # fmt: skip
    capacity = block_tables.shape[1] * page_size
    sequences = []
    for index, ((first, last), context) in enumerate(zip(pairwise(starts), contexts, strict=True)):
        if not last - first <= context <= capacity:
            raise ValueError(
                f"ragged_page: context_lens[{index}] is {context}; it must be at least the sequence's {last - first} "
                f"query tokens and at most the {capacity} keys of its row of block_tables"
            )
        if last == first:
            continue
        page = 0 if left is None else max(0, context - (last - first) - left) // page_size
        pages = -(-context // page_size) - page
        sequences.append(Sequence(index, first, last, page, pages, context - page * page_size))
    _check_pages(sequences, block_tables, page_count)
    return sequences


def _check_pages(sequences: list[Sequence], block_tables: torch.Tensor, page_count: int) -> None:
    if not sequences:
        return
    lowest, highest = block_tables.aminmax()
    if lowest.item() >= 0 and highest.item() < page_count:  # unused entries too, as in most calls
        return
    device = block_tables.device
    rows, first, pages = (
        torch.tensor([getattr(s, name) for s in sequences], device=device)[:, None] for name in ("row", "page", "pages")
    )
    column = torch.arange(block_tables.shape[1], device=device)
    used = (column >= first) & (column < first + pages)
    table = block_tables[rows[:, 0]]
    wrong = used & ((table < 0) | (table >= page_count))
    if wrong.any():
        row, place = (int(x) for x in wrong.nonzero()[0])
        raise ValueError(
            f"ragged_page: block_tables[{sequences[row].row}, {place}] is {int(table[row, place])}, a page in use; "
            f"there are pages 0..{page_count - 1}"
        )


def _brief(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, ...]"
