"""Rotary position embedding, https://arxiv.org/abs/2104.09864, in the two layouts of its pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import FLOATS, bounds, check_integer, check_tensors, together


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R) with R <= D -> rotated query and key.

    Feature i of the first half of R turns with feature i + R / 2, or, interleaved (GPT-J), feature 2i with 2i + 1, by
    the angle of entry i of the tables, whose second half repeats the first in both layouts. The features beyond R pass
    through. The tables may also be those of all positions, (L, R): position_ids (B or 1, T) then names their rows, and
    without it they are offset ... offset + T - 1. The result has the dtype of its input; the products are computed in
    the wider of that and the tables' dtype. Raises `ValueError` for shapes that do not fit.
    """
    cos, sin = tables(query, key, cos, sin, position_ids, offset)
    turn = _turn_pairs if interleaved else _turn_halves
    return turn(query, cos, sin), turn(key, cos, sin)


def tables(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_ids: torch.Tensor | None = None, offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cos and sin (B or 1, T, 1, R) of the call's positions; an error where they or the heads do not fit."""
    if not (together(query, key) and together(query, cos) and together(query, sin)):
        check_tensors("rotary", query=query, key=key, cos=cos, sin=sin)
    # sizes are compared with ==: where a graph is traced, `in` says of a symbol that it is no number
    q, k, c = query.shape, key.shape, cos.shape
    all_positions = len(c) == 2
    fits = (
        len(q) == len(k) == 4
        and q[:2] == k[:2]
        and q[3] == k[3]
        and sin.shape == c
        and (all_positions or (len(c) == 3 and (c[0] == 1 or c[0] == q[0]) and c[1] == q[1]))
        and c[-1] <= q[3]
        and c[-1] % 2 == 0
        and query.dtype in FLOATS  # not `floating`: four calls at each layer of each token
        and key.dtype in FLOATS
        and cos.dtype in FLOATS
        and sin.dtype in FLOATS
    )
    if not fits:
        raise ValueError(
            f"rotary takes query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R) or (L, R) with an even "
            f"R <= D, all floating; got query {tuple(q)}, key {tuple(k)}, cos {tuple(c)}, sin "
            f"{tuple(sin.shape)} of {query.dtype}, {key.dtype}, {cos.dtype} and {sin.dtype}"
        )
    if all_positions:
        cos, sin = _rows(cos, sin, q[0], q[1], position_ids, offset)
    elif position_ids is not None or (offset is not None and offset != 0):
        raise ValueError(f"rotary: position_ids and offset choose rows of tables (L, R), but cos is {tuple(c)}")
    return cos.unsqueeze(2), sin.unsqueeze(2)


def _rows(
    cos: torch.Tensor, sin: torch.Tensor, batch: int, length: int, position_ids: torch.Tensor | None, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, R) -> (B or 1, T, R)."""
    check_integer("rotary", "offset", 0.0 if offset is None else offset)
    check_tensors("rotary", cos=cos, position_ids=position_ids)
    if position_ids is None:
        if offset < 0 or offset + length > cos.shape[0]:
            raise ValueError(
                f"rotary: tables of {cos.shape[0]} positions have no rows {offset} to {offset + length}, which offset "
                f"{offset} asks for"
            )
        return cos[None, offset : offset + length], sin[None, offset : offset + length]
    shape = position_ids.shape
    integers = position_ids.dtype in (torch.int32, torch.int64)
    if len(shape) != 2 or not (shape[0] == 1 or shape[0] == batch) or shape[1] != length or not integers:
        raise ValueError(
            f"rotary: position_ids must be integers (B or 1, T), here ({batch} or 1, {length}), got "
            f"{tuple(shape)} of {position_ids.dtype}"
        )
    if offset:
        raise ValueError("rotary: position_ids and offset exclude each other; add the offset to position_ids")
    limits = bounds(position_ids)
    if limits is not None and not 0 <= limits[0] <= limits[1] < cos.shape[0]:
        raise ValueError(
            f"rotary: position_ids must be in 0..{cos.shape[0] - 1}, the rows of the tables, got {limits[0]} to "
            f"{limits[1]}"
        )
    # not cos[position_ids], which counts negative ones from the end
    return F.embedding(position_ids, cos), F.embedding(position_ids, sin)


def _turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dim = cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = turned.chunk(2, dim=-1)
    rotated = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


def _turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dim, half = cos.shape[-1], cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    even, odd = x[..., 0:dim:2], x[..., 1:dim:2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)
