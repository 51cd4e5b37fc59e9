"""Rotary position embedding in the half-rotation layout, https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R) with R <= D -> rotated query and key.

    Feature i of the first half of R turns with feature i + R / 2; the features beyond R pass through. The result has
    the dtype of its input; the products are formed in the wider of that and the tables' dtype.
    """
    _check(query, key, cos, sin)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dim = cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = turned.chunk(2, dim=-1)
    rotated = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


def _check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    q, k, c = query.shape, key.shape, cos.shape
    fits = (
        len(q) == len(k) == 4
        and len(c) == 3
        and sin.shape == c
        and q[:2] == k[:2]
        and q[3] == k[3]
        and c[0] in (1, q[0])
        and c[1] == q[1]
        and c[2] <= q[3]
        and c[2] % 2 == 0
    )
    if not fits:
        raise ValueError(
            f"rotary takes query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R) with an even R <= D; got "
            f"query {tuple(q)}, key {tuple(k)}, cos {tuple(c)}, sin {tuple(sin.shape)}"
        )
