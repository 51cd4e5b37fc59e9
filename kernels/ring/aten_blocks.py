"""Tiles by ATen's flash kernel for the CPU where the tile is full or causal; other tiles by the definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.aten_fused import LANES
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.attention.logsumexp import fits_one_number, from_one_number, one_number
from easytorch.kernels.ring import blocks
from easytorch.kernels.ring.blocks import Block

_aten = torch.ops.aten


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None, or the reason why ATen's kernel can compute no tile of the call."""
    if any(features.get(name) is not None for name in ("mask", "bias", "query_segment_ids")):
        return "ATen's kernel would materialize a mask of the whole block"
    if features.get("softcap") is not None:
        return "ATen has no softcap"
    if features.get("dropout_prob", 0.0) > 0.0:
        return "ATen draws its own dropout mask"
    if query.shape[-1:] != value.shape[-1:]:
        return f"ATen's CPU kernel takes one head_dim, got {tuple(query.shape)} and {tuple(value.shape)}"
    return None


def forward(block: Block) -> tuple[Tensor, Tensor]:
    if not _carries(block):
        return blocks.forward(block)
    output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(block.query, block.key, block.value), 0.0, block.upper is not None, scale=block.call.scale
    )
    if not fits_one_number(logsumexp):
        return blocks.forward(block)
    return output.transpose(1, 2), from_one_number(logsumexp)


def backward(
    block: Block, output: Tensor, logsumexp: Tensor, grad: Tensor, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    single = one_number(logsumexp)
    if not _carries(block) or not fits_one_number(single):
        return blocks.backward(block, output, logsumexp, grad, bias_grad)
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad, block.query, block.key, block.value, output), single, 0.0, block.upper is not None,
        scale=block.call.scale,
    )  # fmt: skip
    query, key, value = (gradient.transpose(1, 2) for gradient in gradients)
    return query, key, value


def _carries(block: Block) -> bool:
    if block.upper is not None and block.call.scale <= 0.0:
        return False  # ATen's kernel applies the causal mask before the scale
    # an empty tensor makes it divide by zero, and of few keys it loses a query of NaN
    return block.lower is None and block.upper in (None, 0) and block.query.numel() > 0 and block.key.shape[1] >= LANES


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [readable(tensor).transpose(1, 2) for tensor in tensors]
