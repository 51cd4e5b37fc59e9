"""The two plans of contract.py: what each does to the tensors before attention and to its output."""

from __future__ import annotations

import torch


def expand(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query (B, T, H, Dn + R), key (B, S, H, Dn + R) and value (B, S, H, Dv) for ordinary attention."""
    heads = up_key.shape[0]
    # autocast casts the product, but not what it is concatenated with
    key, value = (torch.einsum("bsl,hdl->bshd", latent, up).to(query.dtype) for up in (up_key, up_value))
    shared = key_rope[:, :, None].expand(-1, -1, heads, -1)
    return torch.cat([query, query_rope], dim=-1), torch.cat([key, shared], dim=-1), value


def absorb(query: torch.Tensor, up_key: torch.Tensor | None) -> torch.Tensor:
    """query (..., H, Dn) -> (..., H, L), which is multiplied with the latents."""
    return query if up_key is None else _by_head(query, up_key)


def project(output: torch.Tensor, up_value: torch.Tensor | None) -> torch.Tensor:
    """Attention's output over the latents (..., H, L) -> (..., H, Dv)."""
    return output if up_value is None else _by_head(output, up_value.mT)


def _by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """(..., H, I), (H, I, J) -> (..., H, J), in x's dtype."""
    product = torch.bmm(x.flatten(0, -3).transpose(0, 1), matrices).transpose(0, 1)
    return product.reshape(*x.shape[:-1], matrices.shape[-1]).to(x.dtype)
