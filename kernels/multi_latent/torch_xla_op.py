"""The absorbed plan inside a torch_xla graph, by the paged kernel (kernels/ragged_page). Forward only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.multi_latent.contract import check_tensors, default_scale
from easytorch.kernels.multi_latent.paged import Pages, resolve
from easytorch.kernels.multi_latent.plans import absorb, project
from easytorch.kernels.ragged_page.contract import resolve_features
from easytorch.kernels.ragged_page.torch_xla_op import attend

PAGE = 128  # page size that a dense cache is split into


def multi_latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None = None,
    up_value: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    **features: Any,
) -> torch.Tensor:
    """-> (B, T, H, Dv), or (B, T, H, L) without `up_value`. A dense cache is treated as pages in order."""
    check_devices("multi_latent", query=query, sinks=features.get("sinks"))
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    batch, length = query.shape[:2]
    keys = latent.shape[1]
    pages = -(-keys // PAGE)
    latents, ropes = (
        F.pad(x, (0, 0, 0, pages * PAGE - keys)).reshape(batch * pages, PAGE, -1) for x in (latent, key_rope)
    )
    numbers = torch.arange(batch * pages, dtype=torch.int32, device=query.device).reshape(batch, pages)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    contexts = torch.full((batch,), keys, dtype=torch.int32, device=query.device)
    call = resolve_features(sizes.heads, default_scale(sizes, softmax_scale), **{"causal": False, **features})
    output = attend(
        absorb(query, up_key).flatten(0, 1), query_rope.flatten(0, 1), latents, ropes, None, contexts, numbers, starts,
        None, call, value_dim=sizes.latent_dim,
    )  # fmt: skip
    return project(output.unflatten(0, (batch, length)), up_value)


def ragged_page_multi_latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent_pages: Pages,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    up_key: torch.Tensor | None = None,
    up_value: torch.Tensor | None = None,
    **features: Any,
) -> torch.Tensor:
    """-> (N, H, Dv), or (N, H, L) without `up_value`; the arguments are those of paged.py."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    paged = resolve(query, query_rope, latent_pages, *tables, up_key, up_value, features)
    queries = absorb(query, up_key)
    # a single pool is passed as it is: splitting it here would copy the whole cache
    tail: torch.Tensor | None = query_rope
    latent: torch.Tensor = paged.latent
    tail_keys: torch.Tensor | None = paged.rope
    if isinstance(latent_pages, torch.Tensor):
        queries, tail, latent, tail_keys = torch.cat([queries, query_rope], dim=-1), None, latent_pages, None
    output = attend(queries, tail, latent, tail_keys, None, *tables, paged.call, value_dim=paged.sizes.latent_dim)
    return project(output, up_value)
