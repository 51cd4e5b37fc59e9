"""Tiles by the Triton flash kernels, which take any band of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from easytorch.kernels.attention import triton_flash
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.ring.blocks import Block


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None, or the reason why the kernels cannot compute the call's tiles."""
    if features.get("dropout_prob", 0.0) > 0.0:
        return "the Triton kernels drop weights by their place in the tile, not in the whole sequence"
    return triton_flash.supports(query, key, value)


def forward(block: Block) -> tuple[Tensor, Tensor]:
    return triton_flash.flash_forward(block.query, block.key, block.value, _call(block), natural=True)


def backward(
    block: Block, output: Tensor, logsumexp: Tensor, grad: Tensor, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(block)
    if bias_grad is not None:
        assert call.bias is not None
        call = call._replace(bias=call.bias.float())  # whose gradient is then float32 too
    query, key, value, bias, _ = triton_flash.flash_backward(
        grad, output, logsumexp.contiguous(), block.query, block.key, block.value, call, bias_grad is not None,
        natural=True,
    )  # fmt: skip
    if bias_grad is not None:
        bias_grad.add_(bias)
    return query, key, value


def _call(block: Block) -> AttentionCall:
    return block.call._replace(seed=None, dropout_prob=0.0)  # the ring passes a seed without dropout too
