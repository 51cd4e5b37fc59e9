"""Rotary embedding by the operator in C++ (cpu*.cpp here): one call for query and key, and one for their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import last_dim_contiguous, refusal_of_one_dtype, takes
from easytorch.kernels.interop.torch_func import batched_by_autograd, recording, transforming
from easytorch.kernels.rotary import native

# The fewest numbers of the query that it is chosen for in training: of fewer the autograd.Function takes the time.
SMALLEST_IN_TRAINING = 2**16


def supports(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> str | None:
    """None when `rotary` takes this call, else the reason. The first call may build the library."""
    if interleaved:
        return "it turns halves, not pairs side by side"
    if recording(cos, sin):
        return "gradients of the tables are taken by the definition"
    return refusal_of_one_dtype(query, key, cos, sin, gradients=True)


def prefers(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True where `run` is faster than ATen and may be called right away: halves, the tables of the call's positions
    (B or 1, T, R), and all of it fits. It may build the library."""
    if not (processor.AVX2 and query.dim() == key.dim() == 4 and cos.dim() == 3):  # where measured
        return False
    if not takes(query, key, cos, sin, gradients=True):
        return False
    if recording(query, key, cos, sin) and (query.numel() < SMALLEST_IN_TRAINING or recording(cos, sin)):
        return False
    batch, rows, _, size = query.shape
    key_batch, key_rows, _, key_size = key.shape
    tables = cos.shape
    own, positions, turned = tables
    return (
        batch == key_batch
        and rows == key_rows == positions
        and size == key_size
        and sin.shape == tables
        and (own == 1 or own == batch)
        and turned <= size
        and turned % 2 == 0
    )


def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    position_ids: Tensor | None = None, offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition's result, every step rounded as there.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    cos, sin = (table.squeeze(2) for table in native.tables(query, key, cos, sin, position_ids, offset))
    if (reason := supports(query, key, cos, sin, interleaved)) is not None:
        raise NotImplementedError(reason)
    return run(query, key, cos, sin, library.BEST)


def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R): `rotary` without its checks."""
    if recording(query, key):
        turned: tuple[Tensor, Tensor] = _Turn.apply(query, key, cos, sin, level)
        return turned
    return _turn(query, key, cos, sin, level)


class _Turn(torch.autograd.Function):
    """A rotation by halves, whose gradient is the rotation back; gradients of every order, after the first the
    definition's. The tables alone are kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, level: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.level = level
        return _turn(query, key, cos, sin, level)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        below, above = sin.chunk(2, -1)
        back = torch.cat((-above, -below), -1)
        if torch.is_grad_enabled() or transforming() or batched_by_autograd(of_query):
            turned = native.rotary(of_query, of_key, cos, back)
        else:
            turned = _turn(of_query, of_key, cos, back, ctx.level)
        needed = ctx.needs_input_grad[:2]
        return *(one if need else None for one, need in zip(turned, needed, strict=True)), None, None, None


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, level: int) -> tuple[Tensor, Tensor]:
    return torch.ops.easytorch_cpu.rotary.default(
        last_dim_contiguous(query), last_dim_contiguous(key), last_dim_contiguous(cos), last_dim_contiguous(sin), level
    )
