"""Small calls of attention as ATen computes them, without checks, for tensors like those of an earlier call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from easytorch.kernels.attention.aten_fused import LANES
from easytorch.kernels.attention.cpp_call import NO_NUMBERS, NO_TENSORS
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.cpu import library
from easytorch.kernels.decode import cpu
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.repeated.steps import GIVEN, Operator, Output, Steps
from easytorch.operations.dispatch.output import AttentionOutput

_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_UNCHANGED = {
    torch._C._get_flash_sdp_enabled: True,
    (F, "scaled_dot_product_attention"): torch._C._nn.scaled_dot_product_attention,
}
_OUTPUT = Output(AttentionOutput, {field.name: field.default for field in fields(AttentionOutput)})


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

    scale = None if softmax_scale is None else float(softmax_scale)
    if grouped or not _flash(query, key, value, aligned, softmax_scale):
        return run
    return Steps(
        run, (Operator(_FLASH, (*GIVEN[:3], 0.0, aligned, None, scale)),), given_turned=True, result_turned=True,
        switches=_UNCHANGED, output=_OUTPUT,
    )  # fmt: skip


def decode_shortcut(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool | None = None, softmax_scale: float | None = None,
    **features: Any,
) -> Callable[..., AttentionOutput] | None:  # fmt: skip
    """The same of one query by the operator in C++, for which causal changes nothing."""
    strided = any(one.stride(-1) != 1 for one in (query, key, value))
    if strided or not _plain(features, softmax_scale) or 0 in key.shape:
        return None
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)

    def run(query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        output = cpu.one_token(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        return AttentionOutput(attention_outputs=output)

    arguments = (*GIVEN[:3], None, *NO_TENSORS, scale, *NO_NUMBERS, library.BEST)
    return Steps(run, (Operator("easytorch_cpu::decode", arguments),), given_turned=True, output=_OUTPUT)


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> bool:
    """Whether ATen's attention takes its flash kernel for such a call."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    chosen: int = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale)
    return chosen == SDPBackend.FLASH_ATTENTION.value


def _plain(features: Mapping[str, Any], softmax_scale: float | None) -> bool:
    """Whether nothing is asked for but a positive scale: no dropout, which may be given as 0."""
    given = any(feature is not None for name, feature in features.items() if name != "dropout_prob")
    return not given and not features.get("dropout_prob") and (softmax_scale is None or softmax_scale > 0.0)
