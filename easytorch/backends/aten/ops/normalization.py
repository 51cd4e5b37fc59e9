"""Normalization over a batch (Ioffe and Szegedy 2015), and the composite operations, which torch has whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.ops.elementwise import plain
from easytorch.backends.aten.storage_dtypes import narrow, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OpType

# Keys below which ATen's CPU kernel, without a mask, takes a query of NaN for one that sees nothing.
_LANES = 16


def _along(context: NodeContext) -> list[int]:
    """The shape that broadcasts a vector along the feature axis of the operand."""
    axis = context.attributes["axis"]
    return [-1 if other == axis else 1 for other in range(context.operand.rank)]


def _others(context: NodeContext) -> tuple[int, ...]:
    return tuple(axis for axis in range(context.operand.rank) if axis != context.attributes["axis"])


def _mean(x: Tensor, axes: Sequence[int]) -> Tensor:
    return torch.mean(x, tuple(axes)) if axes else x


def _widened(context: NodeContext, function: Kernel) -> Kernel:
    dtype = context.dtype
    if dtype.size >= 4:
        return function

    def computed(*xs: Tensor) -> Tensor | tuple[Tensor, ...]:
        result = function(*(wide(x, dtype) for x in xs))
        return tuple(narrow(one, dtype) for one in result) if isinstance(result, tuple) else narrow(result, dtype)

    return computed


def _normalize(context: NodeContext) -> Kernel:
    along, epsilon = _along(context), context.attributes["epsilon"]

    def normalize(x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        factor = scale / torch.sqrt(variance + epsilon)
        return (x - mean.reshape(along)) * factor.reshape(along) + offset.reshape(along)

    return normalize


def _inference(context: NodeContext) -> Kernel:
    return _widened(context, _normalize(context))


def _training(context: NodeContext) -> Kernel:
    along, others, normalize = _along(context), _others(context), _normalize(context)

    def train(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = _mean(x, others)
        variance = _mean(torch.square(x - mean.reshape(along)), others)
        return normalize(x, scale, offset, mean, variance), mean, variance

    return _widened(context, train)


def _gradient(context: NodeContext) -> Kernel:
    along, others, epsilon = _along(context), _others(context), context.attributes["epsilon"]

    def total(x: Tensor) -> Tensor:
        return torch.sum(x, others) if others else x

    def gradient(
        x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inverse = 1 / torch.sqrt(variance + epsilon)
        normed = (x - mean.reshape(along)) * inverse.reshape(along)
        weighted = grad_output * normed
        centered = (
            grad_output - _mean(grad_output, others).reshape(along) - normed * _mean(weighted, others).reshape(along)
        )
        return centered * (scale * inverse).reshape(along), total(weighted), total(grad_output)

    return _widened(context, gradient)


def _softmax(context: NodeContext) -> Kernel:
    axis = context.attributes["axis"]
    return plain(lambda x: torch.softmax(x, axis))(context)


def _gelu(context: NodeContext) -> Kernel:
    approximate = "tanh" if context.attributes["approximate"] else "none"
    return plain(lambda x: functional.gelu(x, approximate=approximate))(context)


def _layer_norm(context: NodeContext) -> Kernel:
    axes, epsilon, rank = context.attributes["axes"], context.attributes["epsilon"], context.operand.rank
    sizes = context.shapes[1].dimensions
    order = (*(axis for axis in range(rank) if axis not in axes), *axes)
    back = sorted(range(rank), key=order.__getitem__)
    if order == tuple(range(rank)):
        return plain(lambda x, scale, offset: functional.layer_norm(x, sizes, scale, offset, epsilon))(context)

    def permuted(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return functional.layer_norm(x.permute(order), sizes, scale, offset, epsilon).permute(back)

    return plain(permuted)(context)


def _attention(context: NodeContext) -> Kernel:
    query, key, _, *masks = context.shapes
    is_causal, scale = context.attributes["is_causal"], context.attributes["scale"]
    grouped = key.dimensions[1] != query.dimensions[1]
    length, keys = query.dimensions[2], key.dimensions[2]
    if not keys or not context.output.size:
        return lambda query, *_: query.new_zeros(context.output.dimensions)
    dtype = query.dtype
    if scale is None and not query.dimensions[3]:
        scale = 1.0

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )

    triangle = torch.ones((length, keys), dtype=torch.bool, device=context.device).tril() if is_causal else None
    if not masks and keys < _LANES:
        all_keys = torch.ones((1, keys), dtype=torch.bool, device=context.device)
        seen = all_keys if triangle is None else triangle
        return plain(lambda query, key, value: attend(query, key, value, seen, False))(context)
    if not masks:
        return plain(lambda query, key, value: attend(query, key, value, None, is_causal))(context)

    def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        mask = mask.reshape([1] * (4 - mask.ndim) + list(mask.shape))
        if mask.dtype == torch.bool:
            mask = mask if triangle is None else mask & triangle
            attends = mask.any(-1, keepdim=True)
        else:
            mask = mask if triangle is None else torch.where(triangle, mask, -math.inf)
            attends = (mask != -math.inf).any(-1, keepdim=True)
        # Rows with nothing to attend are zero whichever kernel torch takes.
        return torch.where(attends, attend(query, key, value, mask, is_causal=False), 0)

    if dtype.size > 1:
        return masked

    def narrowed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        mask = mask if masks[0].dtype is DType.BOOL else wide(mask, dtype)
        return narrow(masked(wide(query, dtype), wide(key, dtype), wide(value, dtype), mask), dtype)

    return narrowed


NORMALIZATION: dict[OpType, Binder] = {
    OpType.BATCH_NORM_FOR_INFERENCE: _inference,
    OpType.BATCH_NORM_FOR_TRAINING: _training,
    OpType.BATCH_NORM_GRADIENT: _gradient,
    OpType.SOFTMAX: _softmax,
    OpType.GELU: _gelu,
    OpType.LAYER_NORM: _layer_norm,
    OpType.SCALED_DOT_PRODUCT_ATTENTION: _attention,
}
