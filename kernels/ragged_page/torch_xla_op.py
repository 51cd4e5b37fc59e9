"""pallas_or_jax.py inside a torch_xla graph: one node, without synchronization and without a backward."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.torch_xla_call import call_jax_on
from easytorch.kernels.ragged_page import pallas_or_jax
from easytorch.kernels.ragged_page.contract import resolve


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    **features: Any,
) -> torch.Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype; see contract.py."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    return attend(query, None, key_pages, None, value_pages, *tables, call, value_dim=value_pages.shape[3])


def attend(
    query: torch.Tensor, tail_query: torch.Tensor | None, key: torch.Tensor, tail_key: torch.Tensor | None,
    value: torch.Tensor | None, context_lens: torch.Tensor, block_tables: torch.Tensor, query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None, call: AttentionCall, *, value_dim: int,
) -> torch.Tensor:  # fmt: skip
    """pallas_or_jax.py on checked tensors, of the shapes that jax_pages.py takes."""
    if isinstance(num_seqs, int):
        # as an input of the graph, not a constant: another number must not recompile it
        num_seqs = torch.tensor(num_seqs, dtype=torch.int32).to(query.device)
    tables = [None if x is None else x.to(torch.int32) for x in (context_lens, block_tables, query_start_loc, num_seqs)]
    tensors = (query, tail_query, key, tail_key, value, *tables)
    return call_jax_on(pallas_or_jax.ragged_page_attention, call, *tensors, value_dim=value_dim)
