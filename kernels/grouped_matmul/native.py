"""The definition of grouped_matmul, as `jax.lax.ragged_dot` has it."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.arguments import bounds, check_tensors, floating


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """x (M, K), weight (E, K, N), group_sizes (E,) integer, bias (E, N) -> (M, N) in x's dtype.

    The first group_sizes[0] rows are multiplied with weight[0] and get bias[0], the next group_sizes[1] with weight[1],
    and so on; rows past the sum of the sizes are zeros, whatever x holds there. transposed: weight is (E, N, K), as
    `nn.Linear` stores it. Computed in float32 (float64 for float64) and rounded once. Every expert multiplies every
    row here: this is the definition, not a fast implementation.
    """
    check_arguments(x, weight, group_sizes, bias, transposed)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    ends = group_sizes.cumsum(0)
    starts = ends - group_sizes
    matrices = weight.transpose(1, 2) if transposed else weight
    output = torch.zeros((x.shape[0], matrices.shape[2]), dtype=wide, device=x.device)
    for expert in range(weight.shape[0]):
        inside = (rows >= starts[expert]) & (rows < ends[expert])
        # rows of others may hold anything: an infinity times zero must not reach the gradient of this expert
        product = x.to(wide).where(inside, 0.0) @ matrices[expert].to(wide)
        if bias is not None:
            product = product + bias[expert].to(wide)
        output = torch.where(inside, product, output)
    return output.to(x.dtype)


def check_arguments(
    x: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> None:
    """An error unless all shapes fit, x, weight and bias are floating of one dtype and the sizes are integers.

    Sizes that are negative or sum to more than M are an error too, where they are at hand (`interop/arguments.py`).
    """
    check_tensors("grouped_matmul", x=x, weight=weight, group_sizes=group_sizes, bias=bias)
    stored = "(E, N, K)" if transposed else "(E, K, N)"
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2 if transposed else 1]
    experts, width = (weight.shape[0], weight.shape[1 if transposed else 2]) if fits else (0, 0)
    if not fits or group_sizes.shape != (experts,) or (bias is not None and bias.shape != (experts, width)):
        given = "no bias" if bias is None else f"bias {tuple(bias.shape)}"
        raise ValueError(
            f"grouped_matmul takes x (M, K), weight {stored}, group_sizes (E,) and bias (E, N), got x {tuple(x.shape)},"
            f" weight {tuple(weight.shape)}, group_sizes {tuple(group_sizes.shape)}, {given} "
            f"and transposed={bool(transposed)}"
        )
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"grouped_matmul: group_sizes must be int32 or int64, got {group_sizes.dtype}")
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not floating(x):
        raise ValueError(
            f"grouped_matmul: x, weight and bias must be floating, of one dtype, got "
            f"{', '.join(sorted(map(str, dtypes)))}; cast them, or call it under autocast"
        )
    limits = bounds(group_sizes)
    # each by itself first: the sum of large ones overflows
    if limits is not None and (
        limits[0] < 0 or limits[1] > x.shape[0] or int(group_sizes.sum(dtype=torch.int64)) > x.shape[0]
    ):
        raise ValueError(
            f"grouped_matmul: group_sizes must not be negative nor sum to more than the {x.shape[0]} rows of x, got "
            f"{group_sizes.tolist()}"
        )
