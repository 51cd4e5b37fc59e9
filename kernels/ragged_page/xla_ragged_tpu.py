"""tpu_ragged.py inside a torch_xla graph: one node. It waits for nothing and has no backward."""

from __future__ import annotations

import torch

from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.interop.xla_bridge import call_jax
from easytorch.kernels.ragged_page import tpu_ragged
from easytorch.kernels.ragged_page.contract import Window, check_call


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    causal: bool = True,
    sliding_window: Window = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype; see contract.py."""
    check_call(
        query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs, softcap=softcap,
        sinks=sinks, sliding_window=sliding_window,
    )  # fmt: skip
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    return attend(
        query, None, key_pages, None, value_pages, context_lens, block_tables, query_start_loc, num_seqs, sinks,
        value_dim=value_pages.shape[3], scale=scale, band=band_of(causal, sliding_window), softcap=softcap,
    )  # fmt: skip


def attend(
    query: torch.Tensor, tail_query: torch.Tensor | None, key: torch.Tensor, tail_key: torch.Tensor | None,
    value: torch.Tensor | None, context_lens: torch.Tensor, block_tables: torch.Tensor, query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None, sinks: torch.Tensor | None, *, value_dim: int, scale: float,
    band: tuple[int | None, int | None], softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """tpu_ragged.py on tensors already checked, of the shapes that xla_ragged.py takes."""
    if isinstance(num_seqs, int):
        # as data of the graph, not as a shape or constant: another number must not compile another program
        num_seqs = torch.tensor(num_seqs, dtype=torch.int32).to(query.device)
    tables = [None if x is None else x.to(torch.int32) for x in (context_lens, block_tables, query_start_loc, num_seqs)]
    return call_jax(
        tpu_ragged.ragged_page_attention, query, tail_query, key, tail_key, value, *tables, sinks,
        value_dim=value_dim, scale=float(scale), left=band[0], right=band[1],
        softcap=None if softcap is None else float(softcap),
    )  # fmt: skip
