"""The absorbed plan in plain torch, on any device: memory linear in T, forward and backward. See contract.py."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention import blocked
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.multi_latent.contract import check_tensors, default_scale
from easytorch.kernels.multi_latent.plans import absorb, project

_FEATURES = ("mask", "bias", "query_segment_ids", "key_segment_ids", "sliding_window", "softcap", "sinks")


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
    """-> (B, T, H, Dv), or (B, T, H, L) without `up_value`; features: those of kernels/attention/blocked.py."""
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    scale = default_scale(sizes, softmax_scale)
    query = absorb(query, up_key)
    plain = not any(features.get(name) is not None for name in _FEATURES) and not features.get("dropout_prob")
    # compiled, a loop over the batch would be unrolled
    if plain and query.shape[1] == 1 and not torch.compiler.is_compiling():
        return project(_one_token(query, query_rope, latent, key_rope, scale), up_value)
    keys = torch.cat([latent, key_rope], dim=-1)[:, :, None]
    output = blocked.attention(
        torch.cat([query, query_rope], dim=-1), keys, latent[:, :, None], softmax_scale=scale, **features
    )
    return project(output, up_value)


def _one_token(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """query (B, 1, H, L) over the whole cache, which is neither copied nor, in 16 bits, widened whole."""
    working = working_dtype(query)
    parts = [x.squeeze(1).to(working) * scale for x in (query, query_rope)]
    if latent.dtype == working:
        rotated = parts[1] @ key_rope.transpose(1, 2)
        return (torch.baddbmm(rotated, parts[0], latent.transpose(1, 2)).softmax(dim=-1) @ latent)[:, None]
    outputs = []
    for row in range(query.shape[0]):  # a sequence at a time: what is widened of the cache stays near
        wide = latent[row].to(working)
        scores = torch.addmm(parts[0][row] @ wide.T, parts[1][row], key_rope[row].to(working).T)
        outputs.append(torch.softmax(scores, dim=-1) @ wide)
    return torch.stack(outputs).to(query.dtype)[:, None] if outputs else torch.empty_like(query)
