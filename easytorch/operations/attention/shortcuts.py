"""Small calls of attention as ATen computes them, without checks, for tensors like those of an earlier call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.attention.aten_fused import LANES
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.decode import cpu
from easytorch.kernels.interop.torch_func import recording
from easytorch.operations.dispatch.output import AttentionOutput


def sdpa_shortcut(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool | None = None, softmax_scale: float | None = None,
    **features: Any,
) -> Callable[..., AttentionOutput] | None:  # fmt: skip
    """What `kernels/attention/aten.py` computes of this call and of those of the same sizes and strides, as
    `run(query, key, value)`; None where it looks at numbers, or makes a mask or a copy."""
    length, keys = query.shape[1], key.shape[1]
    aligned = bool(causal) and length > 1  # one query sees every key
    if (
        recording(query, key, value)
        or not _plain(features, softmax_scale)
        or keys < LANES
        or (aligned and length != keys)
        or any(readable(one) is not one for one in (query, key, value))
    ):
        return None
    grouped = query.shape[2] != key.shape[2]

    def run(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=aligned, scale=softmax_scale,
            enable_gqa=grouped,
        )  # fmt: skip
        return AttentionOutput(attention_outputs=output.transpose(1, 2))

    return run


def decode_shortcut(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool | None = None, softmax_scale: float | None = None,
    **features: Any,
) -> Callable[..., AttentionOutput] | None:  # fmt: skip
    """The same of one query by the operator in C++, for which causal changes nothing."""
    strided = any(one.stride(-1) != 1 for one in (query, key, value))
    if strided or not _plain(features, softmax_scale) or 0 in key.shape:
        return None
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def run(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        output = cpu.one_token(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        return AttentionOutput(attention_outputs=output)

    return run


def _plain(features: Mapping[str, Any], softmax_scale: float | None) -> bool:
    """Whether nothing is asked for but a positive scale: no dropout, which may be given as 0."""
    given = any(feature is not None for name, feature in features.items() if name != "dropout_prob")
    return not given and not features.get("dropout_prob") and (softmax_scale is None or softmax_scale > 0.0)
