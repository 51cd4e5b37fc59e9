"""Small calls of attention as ATen computes them, without checks, for tensors like those of an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.attention.aten_fused import LANES
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.decode import cpu
from easytorch.kernels.interop.torch_func import recording
from easytorch.operations.dispatch.output import AttentionOutput


def sdpa_shortcut(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool | None = None, **features: Any
) -> Callable[..., AttentionOutput] | None:
    """What `kernels/attention/aten.py` computes of this call and of those of the same sizes and strides, as
    `run(query, key, value)`; None where it looks at numbers, or makes a mask or a copy."""
    length, keys = query.shape[1], key.shape[1]
    aligned = bool(causal) and length > 1  # one query sees every key
    if (
        recording(query, key, value)
        or any(feature is not None for feature in features.values())
        or keys < LANES
        or (aligned and length != keys)
        or any(readable(one) is not one for one in (query, key, value))
    ):
        return None
    grouped = query.shape[2] != key.shape[2]

    def run(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=aligned, enable_gqa=grouped
        )
        return AttentionOutput(attention_outputs=output.transpose(1, 2))

    return run


def decode_shortcut(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool | None = None, **features: Any
) -> Callable[..., AttentionOutput] | None:
    """The same of one query by the operator in C++, for which causal changes nothing."""
    strided = any(one.stride(-1) != 1 for one in (query, key, value))
    if strided or any(feature is not None for feature in features.values()) or 0 in key.shape:
        return None
    scale = query.shape[-1] ** -0.5

    def run(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        output = cpu.one_token(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        return AttentionOutput(attention_outputs=output)

    return run
