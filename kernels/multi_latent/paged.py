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
from typing import Any

import torch

from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.interop.arguments import check_dense, check_tensors, described
from easytorch.kernels.multi_latent import absorbed, native
from easytorch.kernels.multi_latent.contract import Sizes, absorbs, check_widths, default_scale
from easytorch.kernels.multi_latent.plans import absorb, expand, project
from easytorch.kernels.ragged_page import contract, opaque
from easytorch.kernels.ragged_page.contract import read_sequences

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


def check_call(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
    up_key: torch.Tensor | None, up_value: torch.Tensor | None, tables: tuple[Any, ...], features: dict[str, Any],
) -> Sizes:  # fmt: skip
    """The sizes, or an error for shapes, dtypes and devices that do not fit; reads no tensor's values."""
    check_tensors("ragged_page_multi_latent", query=query, context_lens=tables[0], sinks=features.get("sinks"))
    if query.dim() != 3 or latent.dim() != 3:
        raise ValueError(
            f"ragged_page_multi_latent: expected query (N, H, Dn) and pages (P, page_size, L), got "
            f"{tuple(query.shape)} and {tuple(latent.shape)}"
        )
    sizes = check_widths(query, query_rope, latent, rope, up_key, up_value)
    contract.check_tables(*tables)
    contract.resolve_features(sizes.heads, 1.0, **features)
    return sizes


def definition(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, *, causal: bool = True,
    softmax_dtype: torch.dtype | None = None, **features: Any,
) -> torch.Tensor:  # fmt: skip
    """-> (N, H, Dv), or (N, H, L) without `up_value`: gathers each sequence's latents, then calls the definition."""

    def attend(query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        settled = {**features, "causal": causal, "softmax_dtype": softmax_dtype}
        return native.multi_latent_attention(query, query_rope, latent, rope, up_key, up_value, **settled)[0]

    latent, rope = split_pages(latent_pages, query_rope.shape[-1])
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    sizes = check_call(query, query_rope, latent, rope, up_key, up_value, tables, features)
    left, _ = band_of(causal, features.get("sliding_window"))
    sequences = read_sequences(query.shape[0], latent.shape[0], latent.shape[1], *tables, left)
    return _each(attend, sequences, query, query_rope, latent, rope, block_tables, sizes)


def by_plans(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, *, softmax_scale: float | None = None,
    **features: Any,
) -> torch.Tensor:  # fmt: skip
    """-> (N, H, Dv), or (N, H, L) without `up_value`: each sequence by the plan that is cheaper for its lengths."""
    latent, rope = split_pages(latent_pages, query_rope.shape[-1])
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    sizes = check_call(query, query_rope, latent, rope, up_key, up_value, tables, features)
    settled = {"causal": True, **features, "softmax_scale": default_scale(sizes, softmax_scale)}

    def attend(query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        length, keys = query.shape[1], latent.shape[1]
        if up_key is None or up_value is None or absorbs(sizes, length, keys, True, True):
            tensors = (query, query_rope, latent, rope, up_key, up_value)
            return absorbed.multi_latent_attention(*tensors, **settled)
        expanded = expand(query, query_rope, latent, rope, up_key, up_value)
        return absorbed.attention_of(expanded[0], keys)(*expanded, **settled)

    left, _ = band_of(settled["causal"], features.get("sliding_window"))
    sequences = read_sequences(query.shape[0], latent.shape[0], latent.shape[1], *tables, left)
    return _each(attend, sequences, query, query_rope, latent, rope, block_tables, sizes)


def in_graph(
    query: torch.Tensor, query_rope: torch.Tensor, latent_pages: Pages, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None, up_value: torch.Tensor | None = None, *, softmax_scale: float | None = None,
    softmax_dtype: torch.dtype | None = None, **features: Any,
) -> torch.Tensor:  # fmt: skip
    """For tracing, where control flow cannot depend on lengths: the absorbed plan, through a custom operator."""
    latent, rope = split_pages(latent_pages, query_rope.shape[-1])
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    sizes = check_call(query, query_rope, latent, rope, up_key, up_value, tables, features)
    queries = torch.cat([absorb(query, up_key), query_rope], dim=-1)
    keys = latent_pages if isinstance(latent_pages, torch.Tensor) else torch.cat(latent_pages, dim=-1)
    scale = default_scale(sizes, softmax_scale)
    output = opaque.ragged_page_attention(
        queries, keys[:, :, None], latent[:, :, None], *tables, softmax_scale=scale, softmax_dtype=softmax_dtype,
        **features,
    )  # fmt: skip
    return project(output, up_value)


def _each(
    attend: Callable[..., torch.Tensor], sequences: list[contract.Sequence], query: torch.Tensor,
    query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, block_tables: torch.Tensor, sizes: Sizes,
) -> torch.Tensor:  # fmt: skip
    """`attend(query, query_rope, latent, key_rope)` of each sequence as a batch of one; zeros for rows that belong to
    no sequence."""
    outputs = []
    for s in sequences:
        pages = block_tables[s.row, s.page : s.page + s.pages]
        keys = (pool[pages].flatten(0, 1)[None, : s.keys] for pool in (latent, rope))
        outputs.append(attend(query[None, s.first : s.last], query_rope[None, s.first : s.last], *keys)[0])
    owned = sequences[-1].last if sequences else 0
    return torch.cat([*outputs, query.new_zeros(query.shape[0] - owned, sizes.heads, sizes.value_dim)])
