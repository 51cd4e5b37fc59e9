"""The arguments of multi-head latent attention, checked, and the two ways to compute it.

    multi_latent_attention(query, query_rope, latent, key_rope, up_key=None, up_value=None, **features)

Legend: B batch, T query length, S key length, H heads, L width of the latent (the compressed, normalized keys and
values), R width of the rotated part of a key, which all heads share; Dn and Dv head_dim of the unrotated part of query
and key, and of value.

    query (B, T, H, Dn)      query_rope (B, T, H, R)      up_key (H, Dn, L)
    latent (B, S, L)         key_rope (B, S, R)           up_value (H, Dv, L)

    key[h]   = [up_key[h] @ latent, key_rope]       value[h] = up_value[h] @ latent
    output   = attention of [query, query_rope] over key and value                              (B, T, H, Dv)

Without `up_key` the query holds it already, query[h] @ up_key[h]: (B, T, H, L). Without `up_value` the values are the
latents, and the output is (B, T, H, L). The features are those of kernels/attention/contract.py; softmax_scale is
(width of query + R) ** -0.5 unless given: (Dn + R) ** -0.5, but for a query that holds up_key (L + R) ** -0.5, which is
rarely what its model was trained with, so give it there.

Two plans give the same: expanded forms the keys and values of every head, S * H * (Dn + Dv) * L multiplications before
attention; absorbed moves both projections to the query's side and attends to the latents themselves, as one key/value
head of L + R: for few queries over a long cache. DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.interop.arguments import floating


class LatentDims(NamedTuple):
    """The dimensions of one layer of multi-head latent attention."""

    heads: int
    query_dim: int
    rope_dim: int
    latent_dim: int
    value_dim: int  # of the output


def check_widths(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None,
    up_value: torch.Tensor | None,
) -> LatentDims:
    """The dimensions, the same for dense (B, T, H, ...) and ragged (tokens, H, ...) queries, or an error."""
    check_devices(
        "multi_latent", query=query, query_rope=query_rope, latent=latent, key_rope=key_rope, up_key=up_key,
        up_value=up_value,
    )  # fmt: skip
    if query.dim() < 2 or query_rope.dim() < 2 or latent.dim() < 2 or key_rope.dim() < 2:
        raise ValueError(
            f"multi_latent: expected query (..., H, Dn), query_rope (..., H, R), latent (..., L), key_rope (..., R), "
            f"got {_shape(query)}, {_shape(query_rope)}, {_shape(latent)} and {_shape(key_rope)}"
        )
    heads, dim = query.shape[-2:]
    rope, width = query_rope.shape[-1], latent.shape[-1]
    given = [x for x in (query, query_rope, latent, key_rope, up_key, up_value) if x is not None]
    problem = None
    if query.dim() != query_rope.dim() or query.shape[:-1] != query_rope.shape[:-1]:
        problem = "query and query_rope must agree in all but the last dimension"
    elif latent.dim() != key_rope.dim() or latent.shape[:-1] != key_rope.shape[:-1]:
        problem = "latent and key_rope must agree in all but the last dimension"
    elif key_rope.shape[-1] != rope:
        problem = "query_rope and key_rope differ in width"
    elif up_key is None and dim != width:
        problem = "without up_key the query must be as wide as the latent"
    elif up_key is not None and up_key.shape != (heads, dim, width):
        problem = f"up_key must be (H, Dn, L) = ({heads}, {dim}, {width})"
    elif up_value is not None and (up_value.dim() != 3 or (up_value.shape[0], up_value.shape[2]) != (heads, width)):
        problem = f"up_value must be (H, Dv, L) = ({heads}, Dv, {width})"
    elif any(x.dtype != query.dtype for x in given) or not floating(query):
        problem = f"all tensors must be floating, of one dtype, got {', '.join(str(x.dtype) for x in given)}"
    elif dim + rope == 0 or heads == 0:
        problem = "there must be a head, and a number in it"
    if problem is not None:
        raise ValueError(
            f"multi_latent: {problem}: query {tuple(query.shape)}, query_rope {tuple(query_rope.shape)}, latent "
            f"{tuple(latent.shape)}, key_rope {tuple(key_rope.shape)}, up_key {_shape(up_key)}, up_value "
            f"{_shape(up_value)}"
        )
    return LatentDims(heads, dim, rope, width, width if up_value is None else up_value.shape[1])


def check_tensors(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None = None,
    up_value: torch.Tensor | None = None,
) -> LatentDims:
    """The dimensions of a dense call, or an error that names what does not fit."""
    check_devices("multi_latent", query=query, latent=latent)
    if query.dim() != 4 or latent.dim() != 3 or query.shape[0] != latent.shape[0]:
        raise ValueError(
            f"multi_latent: expected query (B, T, H, Dn) and latent (B, S, L), got {tuple(query.shape)} and "
            f"{tuple(latent.shape)}"
        )
    return check_widths(query, query_rope, latent, key_rope, up_key, up_value)


def default_scale(sizes: LatentDims, softmax_scale: float | None) -> float:
    return (sizes.query_dim + sizes.rope_dim) ** -0.5 if softmax_scale is None else softmax_scale


def absorbs(sizes: LatentDims, length: int, keys: int, has_up_key: bool, has_up_value: bool) -> bool:
    """True where attending to the latents takes fewer multiplications than expanding every head's keys and values."""
    if not (has_up_key and has_up_value):
        return True
    n = sizes
    projections = n.latent_dim * (n.query_dim + n.value_dim)
    expanded = keys * projections + length * keys * (n.query_dim + n.rope_dim + n.value_dim)
    absorbed = length * projections + length * keys * (2 * n.latent_dim + n.rope_dim)
    return absorbed < expanded


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
