"""The absorbed plan by the paged kernel (kernels/ragged_page), over a dense or a paged cache. Forward only.

latent and key_rope are the two parts of a key, and the latent is the value too; a dense cache is a paged one with one
page per sequence. Triton is imported when a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.multi_latent.contract import LatentDims, check_tensors, default_scale
from easytorch.kernels.multi_latent.paged import Pages, resolve
from easytorch.kernels.multi_latent.plans import absorb, project
from easytorch.kernels.ragged_page import triton_op as pages
from easytorch.kernels.ragged_page.contract import cut_to, resolve_features
from easytorch.kernels.ragged_page.triton_tuning import MAX_HEAD_DIM


def supports(device: torch.device, dtype: torch.dtype, sizes: LatentDims) -> str | None:
    """None when the kernels take tensors of this device, dtype and these sizes, else the reason."""
    if sizes.rope_dim > MAX_HEAD_DIM:
        return f"the rotated part of a key must be at most {MAX_HEAD_DIM} wide, got {sizes.rope_dim}"
    return pages.supports(device, dtype, sizes.latent_dim, sizes.latent_dim)


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
    """-> (B, T, H, Dv), or (B, T, H, L) without `up_value`; scores and sums in float32. It has no backward."""
    check_devices("multi_latent", query=query, sinks=features.get("sinks"))
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    batch, length = query.shape[:2]
    keys = latent.shape[1]
    call = resolve_features(sizes.heads, default_scale(sizes, softmax_scale), **{"causal": False, **features})
    count = torch.arange(batch + 1, device=query.device, dtype=torch.int32)
    contexts = torch.full((batch,), keys, device=query.device, dtype=torch.int32)
    output = pages.over_pages(
        absorb(query, up_key).flatten(0, 1), query_rope.flatten(0, 1), latent[:, :, None], key_rope[:, :, None], None,
        (contexts, count[:batch, None], count * length, None), call,
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
    """-> (N, H, Dv), or (N, H, L) without `up_value`; the arguments are those of paged.py. It has no backward."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    paged = resolve(query, query_rope, latent_pages, *tables, up_key, up_value, features)
    output = pages.over_pages(
        absorb(query, up_key),
        query_rope,
        paged.latent[:, :, None],
        paged.rope[:, :, None],
        None,
        cut_to(num_seqs, *tables[:3]),
        paged.call,
    )
    return project(output, up_value)
