"""Tiles by the Triton flash kernels, which take any band of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention import triton_flash
from easytorch.kernels.ring.blocks import Block

_easytorch = torch.ops.easytorch


def supports(query: Tensor, key: Tensor, value: Tensor, *, dropout_prob: float) -> str | None:
    """None, or why the kernels cannot take the call's tiles."""
    if dropout_prob > 0.0:
        return "the Triton kernels drop weights by their place in the tile, not in the whole sequence"
    return triton_flash.supports(query, key, value)


def forward(block: Block) -> tuple[Tensor, Tensor]:
    return _easytorch.triton_flash_forward(block.query, block.key, block.value, *_tensors(block), *_numbers(block))


def backward(
    block: Block, output: Tensor, logsumexp: Tensor, grad: Tensor, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = list(_tensors(block))
    if bias_grad is not None:
        assert block.bias is not None
        tensors[0] = block.bias.float()  # whose gradient is then float32 too
    query, key, value, bias, _ = _easytorch.triton_flash_backward(
        grad, block.query, block.key, block.value, output, logsumexp.contiguous(), *tensors, *_numbers(block),
        bias_grad is not None,
    )  # fmt: skip
    if bias_grad is not None:
        bias_grad.add_(bias)
    return query, key, value


def _tensors(block: Block) -> tuple[Tensor | None, ...]:
    """bias, mask, segment ids, sinks and seed: the sinks are the ring's own."""
    return block.bias, block.mask, block.query_ids, block.key_ids, None, None


def _numbers(block: Block) -> tuple[int | float | None, ...]:
    """left, right, softcap, scale, dropout_prob: the kernels align the last row with the last column."""
    aligned = block.key.shape[1] - block.query.shape[1]
    left = None if block.lower is None else aligned - block.lower
    right = None if block.upper is None else block.upper - aligned
    return left, right, block.softcap, block.scale, 0.0
