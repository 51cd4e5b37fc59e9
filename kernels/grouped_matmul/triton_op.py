"""grouped_matmul in Triton, forward and backward, for CUDA and ROCm; the sizes of the groups stay on the device.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

import torch

from easytorch.kernels.grouped_matmul import operators
from easytorch.kernels.grouped_matmul.native import check_arguments
from easytorch.kernels.grouped_matmul.triton_tuning import forward_tiles, weight_grad_tiles
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, processors, refusal


def supports(x: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when these kernels carry x as `dtype` (None: its own), else the reason why not."""
    return refusal(x.device, dtype or x.dtype)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,), bias (E, N) -> (M, N), see native.py.

    Nothing waits for the device: sizes that sum to more than M are cut off there, negative ones count as 0. Raises
    `ValueError` for shapes that do not fit and for what `supports` refuses.
    """
    check_arguments(x, weight, group_sizes, bias, transposed)
    reason = supports(x)
    if reason is not None:
        raise ValueError(f"triton grouped_matmul: {reason}")
    return _multiply(x, weight, group_sizes, bias, transposed)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    from easytorch.kernels.grouped_matmul.triton_calls import bounds_of, edges_of, forward_call

    output = x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])
    tiles = forward_tiles(_architecture(x), x.dtype, x.shape[0], weight.shape[0])
    edges = edges_of(group_sizes, x.shape[0])
    bounds = bounds_of(edges, tiles.block_m)
    bias = None if bias is None else bias.contiguous()
    count = processors(x.device)
    forward_call(tiles, _adjacent(x), weight, bias, output, bounds, edges, transposed, count).launch()
    return output


def _weight_grad(left: torch.Tensor, right: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    from easytorch.kernels.grouped_matmul.triton_calls import edges_of, weight_grad_call

    output = left.new_empty(group_sizes.shape[0], left.shape[1], right.shape[1])
    tiles = weight_grad_tiles(_architecture(left), left.dtype)
    edges = edges_of(group_sizes, left.shape[0])
    weight_grad_call(tiles, _adjacent(left), _adjacent(right), output, edges).launch()
    return output


def _adjacent(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _architecture(tensor: torch.Tensor) -> str:
    architecture = architecture_of(tensor.device)
    if architecture is None:
        raise ValueError(f"triton grouped_matmul: {TOO_OLD}")
    return architecture


_multiply = operators.define("triton", _forward, _weight_grad)
