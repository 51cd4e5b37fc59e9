"""Attention of many queries by the operator in C++ (cpu*.cpp here): tiles of scores in float32 that stay in the caches,
products of bfloat16 by dot products where the CPU has them; tiles that the band or the segments hide are skipped;
backward computes the scores again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call, cpu_gradient
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.interop.torch_func import recording


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `attention` carries this call, else the reason. Asking may build the library."""
    return cpp_call.refusal(query, key, value, features, gradients=True)


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    call = resolve(query, key, value, **features)  # refuses what `supports` cannot look at
    if (reason := supports(query, key, value, features)) is not None:
        raise NotImplementedError(f"attention: {reason}")
    return run(query, key, value, call, library.BEST)


def preferred(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """`attention` of a call that `preference.prefers_cpp` accepted: `supports` is not called again."""
    return run(query, key, value, resolve(query, key, value, **features), library.BEST)


def run(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, level: int) -> Tensor:
    """`attention` of a resolved call."""
    if recording(query, key, value, call.bias, call.sinks):
        return cpu_gradient.attention(query, key, value, call, level)
    output: Tensor = torch.ops.easytorch_cpu.flash.default(
        last_dim_contiguous(query),
        last_dim_contiguous(key),
        last_dim_contiguous(value),
        *cpp_call.arguments(call),
        level,
    )
    return output
