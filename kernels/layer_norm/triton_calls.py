"""Launches of the norm kernels: arguments and grid. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.interop.triton_call import BlockShape, Call, adjacent, block_of, power_of_two, rows_of
from easytorch.kernels.layer_norm.triton_kernels import norm_backward, norm_forward
from easytorch.kernels.layer_norm.triton_limits import MAX_WIDTH


def forward_call(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, output: torch.Tensor,
    mean: torch.Tensor | None, rstd: torch.Tensor, eps: float,
) -> Call:  # fmt: skip
    """Fills output (..., N), and mean and rstd of each row as float32; mean is None for RMS norm."""
    rows, block = rows_of(x), _block(x)
    arguments = {
        "x": rows, "weight": adjacent(weight), "bias": adjacent(bias), "output": output, "mean": mean, "rstd": rstd,
        "x_stride": rows.stride(0), "ROWS": rows.shape[0], "N": rows.shape[1], "eps": eps, "BLOCK_M": block.rows,
        "BLOCK_N": block.columns,
    }  # fmt: skip
    return Call(norm_forward, -(-rows.shape[0] // block.rows), arguments, block.num_warps)


def backward_call(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor,
    x_grad: torch.Tensor, weight_parts: torch.Tensor | None, bias_parts: torch.Tensor | None, programs: int,
) -> Call:  # fmt: skip
    """Fills x_grad (..., N), and weight_parts and bias_parts (programs, N) float32 where they are given."""
    grads, rows, block = rows_of(grad), rows_of(x), _block(x)
    arguments = {
        "grad": grads, "x": rows, "weight": adjacent(weight), "mean": mean, "rstd": rstd, "x_grad": x_grad,
        "weight_parts": weight_parts, "bias_parts": bias_parts, "grad_stride": grads.stride(0),
        "x_stride": rows.stride(0), "ROWS": rows.shape[0], "N": rows.shape[1], "BLOCK_M": block.rows,
        "BLOCK_N": block.columns,
    }  # fmt: skip
    return Call(norm_backward, programs, arguments, block.num_warps)


def backward_programs(x: torch.Tensor, processors: int) -> int:
    """The grid of `backward_call`: two programs per multiprocessor hide each other's loads, and each writes one row of
    partial sums.

    One program where there are no rows, whose partial sums are zeros.
    """
    blocks = -(-(x.numel() // x.shape[-1] if x.shape[-1] else 0) // _block(x).rows)
    return max(1, min(blocks, 2 * processors))


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Both norms at the width of a 7B model, the widest there is, and that of a head."""
    for width in (128, 4096, MAX_WIDTH):
        x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((4096, width), (width,)))
        row = torch.empty(4096, dtype=torch.float32, device="meta")
        parts = torch.empty(264, width, dtype=torch.float32, device="meta")
        yield f"rms_norm_{width}", forward_call(x, weight, None, x, None, row, 1e-6)
        yield f"rms_norm_backward_{width}", backward_call(x, x, weight, None, row, x, parts, None, 264)
        yield f"layer_norm_{width}", forward_call(x, weight, weight, x, row, row, 1e-5)
        yield f"layer_norm_backward_{width}", backward_call(x, x, weight, row, row, x, parts, parts, 264)


def _block(x: torch.Tensor) -> BlockShape:
    return block_of(x.shape[-1], elements=2048, widest=power_of_two(MAX_WIDTH))
