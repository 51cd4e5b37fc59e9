"""The launches of the grouped matmul: kernels, arguments and grids. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.grouped_matmul.triton_kernels import grouped_forward, grouped_weight_grad
from easytorch.kernels.grouped_matmul.triton_tuning import Tiles, forward_tiles, weight_grad_tiles
from easytorch.kernels.interop.triton_call import Call, power_of_two

# Row tiles of a group that share a column of the weight: 8 x 128 rows by 256 columns touch 1.2 MB at K = 512.
_BAND = 8


def edges_of(group_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """(E,) -> (E + 2,) int32, on the device: where each group starts, where the rows of no group do, and `rows`."""
    ends = group_sizes.clamp(min=0).cumsum(0).clamp(max=rows).to(torch.int32)
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), rows)])


def bounds_of(edges: torch.Tensor, block_m: int) -> torch.Tensor:
    """(E + 2,) -> (E + 2,) int32: the number of row tiles before each group, and of all."""
    tiles = torch.div(edges.diff() + (block_m - 1), block_m, rounding_mode="floor")
    return torch.cat([edges.new_zeros(1), tiles.cumsum(0).to(torch.int32)])


def forward_call(
    tiles: Tiles, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor,
    bounds: torch.Tensor, edges: torch.Tensor, transposed: bool, processors: int,
) -> Call:  # fmt: skip
    """Fills output (M, N); x has adjacent columns, bias is contiguous."""
    matrices = weight.transpose(1, 2) if transposed else weight
    experts, depth, width = matrices.shape
    arguments = {
        "x": x, "weight": matrices, "bias": bias, "output": output, "bounds": bounds, "edges": edges,
        "x_stride": x.stride(0), "expert_stride": matrices.stride(0), "k_stride": matrices.stride(1),
        "n_stride": matrices.stride(2), "E": experts, "K": depth, "N": width, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "BLOCK_E": power_of_two(experts + 1), "BAND": _BAND,
        "PRECISION": _precision(x),
    }  # fmt: skip
    most = (-(-x.shape[0] // tiles.block_m) + experts) * -(-width // tiles.block_n)
    # two programs a multiprocessor: one stores while the other multiplies
    return Call(grouped_forward, min(most, 2 * processors), arguments, tiles.num_warps, tiles.num_stages)


def weight_grad_call(
    tiles: Tiles, left: torch.Tensor, right: torch.Tensor, output: torch.Tensor, edges: torch.Tensor
) -> Call:
    """Fills output (E, A, B); left and right have adjacent columns."""
    experts, a, b = output.shape
    arguments = {
        "left": left, "right": right, "output": output, "edges": edges, "left_stride": left.stride(0),
        "right_stride": right.stride(0), "A": a, "B": b, "BLOCK_M": tiles.block_m, "BLOCK_A": tiles.block_n,
        "BLOCK_B": tiles.block_k, "PRECISION": _precision(left),
    }  # fmt: skip
    programs = experts * -(-a // tiles.block_n) * -(-b // tiles.block_k)
    return Call(grouped_weight_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """64 experts of 2048 by 1408: at decode, in a short and in a long prompt, and their backward."""
    weight = torch.empty(64, 2048, 1408, dtype=dtype, device="meta")
    stored, bias = weight.new_empty(64, 1408, 2048), weight.new_empty(64, 1408)
    edges = torch.empty(66, dtype=torch.int32, device="meta")
    for rows in (512, 4096, 32768):
        x, output = weight.new_empty(rows, 2048), weight.new_empty(rows, 1408)
        tiles = forward_tiles(architecture, dtype, rows, 64)
        yield f"{rows}_rows", forward_call(tiles, x, weight, None, output, edges, edges, False, 132)
        yield f"{rows}_rows_stored", forward_call(tiles, x, stored, bias, output, edges, edges, True, 132)
    yield "weight_grad", weight_grad_call(weight_grad_tiles(architecture, dtype), x, output, weight, edges)


def _precision(x: torch.Tensor) -> str:
    exact = x.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    return "ieee" if exact else "tf32"
