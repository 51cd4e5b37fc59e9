"""Multi-head latent attention over a paged cache of latents: the definition, and one that chooses a plan for each
sequence.

    ragged_page_multi_latent_attention(query, query_rope, latent_pages, context_lens, block_tables, query_start_loc,
                                       num_seqs=None, up_key=None, up_value=None, **features)

query (N, H, Dn), query_rope (N, H, R), and latent_pages (P, page_size, L + R), each row a latent and its rotated key,
or the two as a pair (P, page_size, L) and (P, page_size, R). The rest is as in contract.py and in
kernels/ragged_page/contract.py, whose features these are: causal, sliding_window, softcap, sinks, softmax_scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.interop.arguments import check_dense, check_tensors, described
from easytorch.kernels.multi_latent import absorbed, native
from easytorch.kernels.multi_latent.contract import LatentDims, absorbs, check_widths, default_scale
from easytorch.kernels.multi_latent.plans import absorb, expand, project
from easytorch.kernels.ragged_page import contract, opaque

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def checked_pages(latent_pages: Any) -> Pages:
    """The pages, or a `TypeError` for what is neither a tensor nor a pair of them; `ValueError` for sparse ones."""
    if isinstance(latent_pages, torch.Tensor):
        check_dense("ragged_page_multi_latent", latent_pages=latent_pages)
        return latent_pages
    pair = isinstance(latent_pages, tuple | list) and len(latent_pages) == 2
    if not pair or not all(isinstance(pool, torch.Tensor) for pool in latent_pages):
        raise TypeError(
            f"ragged_page_multi_latent: latent_pages must be a tensor or a pair of them, got {described(latent_pages)}"
        )
    check_dense("ragged_page_multi_latent", **{f"latent_pages[{i}]": pool for i, pool in enumerate(latent_pages)})
    return latent_pages[0], latent_pages[1]


def split_pages(latent_pages: Pages, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, page_size, L), (P, page_size, R): views of one pool, or the two that were given."""
    latent_pages = checked_pages(latent_pages)
    if not isinstance(latent_pages, torch.Tensor):
        return latent_pages
    width = latent_pages.shape[-1] - rope_dim
    if width < 1:
        raise ValueError(
            f"ragged_page_multi_latent: latent_pages hold L + R numbers a token, more than the {rope_dim} of "
            f"query_rope: got {tuple(latent_pages.shape)}"
        )
    return latent_pages[..., :width], latent_pages[..., width:]


class PagedCall(NamedTuple):
    """A checked call: sizes, the two parts of the pages, the tables (context_lens to num_seqs), and the record."""

    sizes: LatentDims
    latent: torch.Tensor
    rope: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | torch.Tensor | None]
    call: AttentionCall


def resolve(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None,
    up_key: torch.Tensor | None, up_value: torch.Tensor | None, features: dict[str, Any],
) -> PagedCall:  # fmt: skip
    """The call, or an error for shapes, dtypes and devices that do not fit; reads no tensor's values."""
    latent, rope = split_pages(latent_pages, query_rope.shape[-1])
    check_tensors("ragged_page_multi_latent", query=query, context_lens=context_lens, sinks=features.get("sinks"))
    if query.dim() != 3 or latent.dim() != 3:
        raise ValueError(
            f"ragged_page_multi_latent: expected query (N, H, Dn) and pages (P, page_size, L), got "
            f"{tuple(query.shape)} and {tuple(latent.shape)}"
        )
    sizes = check_widths(query, query_rope, latent, rope, up_key, up_value)
    contract.check_tables(context_lens, block_tables, query_start_loc, num_seqs)
    call = contract.resolve_features(sizes.heads, default_scale(sizes, None), **features)
    return PagedCall(sizes, latent, rope, (context_lens, block_tables, query_start_loc, num_seqs), call)


def definition(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, *,
    softmax_dtype: torch.dtype | None = None, **features: Any,
) -> torch.Tensor:  # fmt: skip
    """-> (N, H, Dv), or (N, H, L) without `up_value`: gathers each sequence's latents, then calls the definition."""

    def attend(query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return native.define(query, query_rope, latent, rope, up_key, up_value, paged.call, softmax_dtype)[0]

    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    paged = resolve(query, query_rope, latent_pages, *tables, up_key, up_value, features)
    return _each(attend, query, query_rope, paged)


def by_plans(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, **features: Any,
) -> torch.Tensor:  # fmt: skip
    """-> (N, H, Dv), or (N, H, L) without `up_value`: each sequence by the plan that is cheaper for its lengths."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    paged = resolve(query, query_rope, latent_pages, *tables, up_key, up_value, features)

    def attend(query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return _attend(query, query_rope, latent, rope, up_key, up_value, paged)

    return _each(attend, query, query_rope, paged)


def by_plan(
    query: torch.Tensor, query_rope: torch.Tensor, paged: PagedCall, sequence: contract.Sequence,
    up_key: torch.Tensor | None, up_value: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`by_plans` of one sequence: its rows (T, H, Dn) and (T, H, R) -> (T, H, Dv)."""
    return _attend(query[None], query_rope[None], *_keys(paged, sequence), up_key, up_value, paged)[0]


def _attend(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
    up_key: torch.Tensor | None, up_value: torch.Tensor | None, paged: PagedCall,
) -> torch.Tensor:  # fmt: skip
    length, keys = query.shape[1], latent.shape[1]
    if up_key is None or up_value is None or absorbs(paged.sizes, length, keys, True, True):
        return absorbed.attend(query, query_rope, latent, rope, up_key, up_value, paged.call)
    expanded = expand(query, query_rope, latent, rope, up_key, up_value)
    return absorbed.attention_of(expanded[0], keys)(*expanded, paged.call)


def in_graph(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, *,
    softmax_dtype: torch.dtype | None = None, **features: Any,
) -> torch.Tensor:  # fmt: skip
    """For tracing, where control flow cannot depend on lengths: the absorbed plan, through a custom operator."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    paged = resolve(query, query_rope, latent_pages, *tables, up_key, up_value, features)
    queries = torch.cat([absorb(query, up_key), query_rope], dim=-1)
    keys = latent_pages if isinstance(latent_pages, torch.Tensor) else torch.cat(latent_pages, dim=-1)
    output = opaque.over_pages(
        queries, keys[:, :, None], paged.latent[:, :, None], *tables, paged.call, softmax_dtype=softmax_dtype
    )
    return project(output, up_value)


def _each(
    attend: Callable[..., torch.Tensor], query: torch.Tensor, query_rope: torch.Tensor, paged: PagedCall
) -> torch.Tensor:
    """`attend(query, query_rope, latent, key_rope)` of each sequence as a batch of one; zeros for rows that belong to
    no sequence."""
    outputs = []
    page_count, page_size = paged.latent.shape[:2]
    sequences = contract.read_sequences(query.shape[0], page_count, page_size, *paged.tables, paged.call.left)
    for s in sequences:
        rows = slice(s.first, s.last)
        outputs.append(attend(query[None, rows], query_rope[None, rows], *_keys(paged, s))[0])
    owned = sequences[-1].last if sequences else 0
    return torch.cat([*outputs, query.new_zeros(query.shape[0] - owned, paged.sizes.heads, paged.sizes.value_dim)])


def _keys(paged: PagedCall, sequence: contract.Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents (1, S, L) and rotated keys (1, S, R) of a sequence."""
    pages = paged.tables[1][sequence.row, sequence.page : sequence.page + sequence.pages]
    latent, rope = (pool[pages].flatten(0, 1)[None, : sequence.keys] for pool in (paged.latent, paged.rope))
    return latent, rope
