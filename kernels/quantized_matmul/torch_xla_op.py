"""pallas_or_jax.py inside a torch_xla graph: one node forward, one backward."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient
from easytorch.kernels.quantized_matmul import pallas_or_jax
from easytorch.kernels.quantized_matmul.native import check_arguments
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype; see native.py."""
    check_arguments(x, weight, bias)
    weight = weight.separated()
    rows = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
    output = call_jax_with_gradient(
        pallas_or_jax.forward, pallas_or_jax.backward, rows, bias, weight.data, weight.scale, weight.zero,
        format=weight.format, group_size=weight.group_size,
    )  # fmt: skip
    return output.reshape(*x.shape[:-1], weight.shape[0])
