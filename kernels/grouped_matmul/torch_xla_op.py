"""pallas_or_jax.py inside a torch_xla graph: one node forward, one backward, whatever the sizes of the groups."""

from __future__ import annotations

import torch

from easytorch.kernels.grouped_matmul import pallas_or_jax
from easytorch.kernels.grouped_matmul.native import check_arguments
from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,), bias (E, N) -> (M, N), see native.py."""
    check_arguments(x, weight, group_sizes, bias, transposed)
    sizes = group_sizes.to(torch.int32)
    return call_jax_with_gradient(
        pallas_or_jax.forward, pallas_or_jax.backward, x, weight, sizes, bias, transposed=transposed
    )  # fmt: skip
