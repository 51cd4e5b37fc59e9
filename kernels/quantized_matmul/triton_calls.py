"""Launches of the quantized matmul: arguments and grid. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from easytorch.kernels.interop.triton_call import Call
from easytorch.kernels.quantized_matmul.formats import FORMATS
from easytorch.kernels.quantized_matmul.triton_kernels import quantized_forward, quantized_input_grad
from easytorch.kernels.quantized_matmul.triton_tuning import Tiles, tiles_of
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight


def forward_call(
    tiles: Tiles, x: torch.Tensor, weight: QuantizedWeight, levels: torch.Tensor, bias: torch.Tensor | None,
    output: torch.Tensor,
) -> Call:  # fmt: skip
    """Fills output (splits, M, N); x's columns are contiguous. bias is added in every split."""
    splits, rows, outputs = output.shape
    arguments = {
        "x": x, "bias": bias, "output": output, "x_stride": x.stride(0), "M": rows, "SPLITS": splits,
        **_shared(tiles, x, weight, levels),
    }  # fmt: skip
    programs = splits * -(-rows // tiles.block_m) * -(-outputs // tiles.block_n)
    return Call(quantized_forward, programs, arguments, tiles.num_warps, tiles.num_stages)


def input_grad_call(
    tiles: Tiles, grad: torch.Tensor, weight: QuantizedWeight, levels: torch.Tensor, output: torch.Tensor
) -> Call:
    """Fills output (M, K); grad's (M, N) columns are contiguous."""
    rows, columns = output.shape
    arguments = {
        "grad": grad, "output": output, "grad_stride": grad.stride(0), "M": rows,
        **_shared(tiles, grad, weight, levels),
    }  # fmt: skip
    programs = -(-rows // tiles.block_m) * -(-columns // tiles.block_k)
    return Call(quantized_input_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """A layer of a 7B model: a prompt in every format, and for each way to read the weight a token and the backward."""
    size = 4096
    levels = torch.empty(16, device="meta")
    for name, kind in FORMATS.items():
        group_size = kind.group_size or size
        data = torch.empty(size, size // 2 if kind.packed else size, dtype=kind.dtype, device="meta")
        scale = torch.empty(size, size // group_size, device="meta")
        zero = torch.empty_like(scale, dtype=torch.uint8) if name == "int4" else None
        weight = QuantizedWeight(data, scale, zero, name, (size, size), group_size)
        for rows, splits in ((512, 1), (1, 4)):
            if rows == 1 and name in ("int8", "fp8_e5m2", "fp4_e2m1"):
                continue
            x = torch.empty(rows, size, dtype=dtype, device="meta")
            output = torch.empty(splits, rows, size, dtype=torch.float32 if splits > 1 else dtype, device="meta")
            tiles = tiles_of("forward", architecture, dtype, rows, group_size)
            yield f"{name}_{rows}", forward_call(tiles, x, weight, levels, None, output)
        if name in ("int4", "fp8_e4m3fn"):
            x = torch.empty(512, size, dtype=dtype, device="meta")
            tiles = tiles_of("input_grad", architecture, dtype, 512, group_size)
            yield f"{name}_input_grad", input_grad_call(tiles, x, weight, levels, x)


def _shared(tiles: Tiles, x: torch.Tensor, weight: QuantizedWeight, levels: torch.Tensor) -> dict[str, Any]:
    rows, columns = weight.shape
    scale = weight.scale.expand(rows, -1)
    one = scale.shape[1] == 1
    exact = x.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    data = weight.data if weight.data.dtype == torch.uint8 else weight.data.view(torch.uint8)
    return {
        "data": data, "scale": scale, "zero": None if weight.zero is None else weight.zero.expand(rows, -1),
        "levels": levels, "data_stride": data.stride(0), "scale_stride": scale.stride(0), "N": rows, "K": columns,
        "group_size": columns if one else weight.group_size, "FORMAT": weight.format,
        "ONE_GROUP": one or weight.group_size % tiles.block_k == 0, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k, "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
