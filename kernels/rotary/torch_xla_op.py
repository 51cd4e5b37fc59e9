"""pallas_or_jax.py inside a torch_xla graph, one node for query and key; the gradient is another, the inverse
rotation. Under SPMD over the shards of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.installed import missing
from easytorch.kernels.rotary import native


def supports(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """None when `rotary` takes this call, else the reason."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "gradients of the tables are taken by the definition"
    if torch.float64 in (query.dtype, key.dtype, cos.dtype, sin.dtype):
        return "it computes in float32, not float64"
    return missing("jax")


def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    position_ids: Tensor | None = None, offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition's result, computed in float32 and rounded once. Differentiable once in query and key.

    Raises `ValueError` for what `supports` refuses, and for shapes that do not fit.
    """
    if (reason := supports(query, key, cos, sin)) is not None:
        raise ValueError(f"xla rotary: {reason}")
    cos, sin = (table.squeeze(2) for table in native.tables(query, key, cos, sin, position_ids, offset))
    return _Turn.apply(query, key, cos, sin, interleaved, False)


class _Turn(torch.autograd.Function):
    """Saves only cos and sin: the gradients of query and key are rotated back by this same function, so there are
    gradients of every order."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.back = interleaved, back
        return _call(query, key, cos, sin, interleaved, back)

    @staticmethod
    def backward(ctx: Any, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_Turn.apply(query_grad, key_grad, cos, sin, ctx.interleaved, not ctx.back), None, None, None, None


def _call(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> tuple[Tensor, Tensor]:
    from easytorch.kernels.interop.spmd import shards_of
    from easytorch.kernels.interop.xla_bridge import call_jax
    from easytorch.kernels.rotary.pallas_or_jax import rotary, rotary_over_shards

    settings = {"interleaved": interleaved, "back": back}
    if (shards := shards_of(query.shape[0], query.shape[2], key.shape[2])) is not None:
        return call_jax(rotary_over_shards, query, key, cos, sin, shards=shards, **settings)
    return call_jax(rotary, query, key, cos, sin, **settings)
