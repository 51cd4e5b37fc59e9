"""compressed-tensors' checkpoints of integers and fp8, without that library: weights alone.

"pack-quantized": `weight_packed` (N, K * bits / 32) int32, codes of 4 or 8 bits plus half their range, from the lowest
bits along K; `weight_shape` (2,). "int-quantized", "float-quantized", "naive-quantized": `weight` (N, K), int8 or fp8.
Both have `weight_scale`, of a tensor (1,), rows (N, 1), groups (N, groups) or blocks, and may have `weight_zero_point`
(packed along N beside packed codes) and `weight_g_idx` (K,), the group of each column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from easytorch.bridge.errors import CheckpointError
from easytorch.layers.packed_weights import TORCHAO_FORMATS, TorchaoWeight, unpack_int32

PLAIN_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PARTS = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
# Of activations and of a quantized cache, which are computed in the model's dtype here.
_LEFT_OUT = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale")


def compressed_in(names: Collection[str]) -> tuple[dict[str, dict[str, str]], set[str]]:
    """(layer -> part -> name of the tensor, names that are not read) of an open checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and f"{layer}.weight_scale" in names):
            parts = {part: f"{layer}.{part}" for part in _PARTS if f"{layer}.{part}" in names}
            found[layer] = {"codes": name, **parts}
    return found, {name for name in names if name.rpartition(".")[2] in _LEFT_OUT}


def compressed_weight(layer: str, parts: Mapping[str, Tensor], file: Path) -> TorchaoWeight | Tensor:
    """The weight of the checkpoint's tensors: codes, or decoded (N, K) where no grid of groups lies over it."""

    def wrong(part: str, what: str) -> CheckpointError:
        return CheckpointError(what, file=file, tensor=f"{layer}.{part}")

    if "weight_scale" not in parts:
        raise wrong("weight_scale", "is missing beside its codes")
    codes, scale, zero = parts["codes"], parts["weight_scale"], parts.get("weight_zero_point")
    if codes.dim() != 2:
        raise wrong("weight", f"is {tuple(codes.shape)}, and matrices are read")
    if "weight_shape" in parts or codes.dtype == torch.int32:
        codes, zero = _unpacked(parts, wrong)
    if codes.dtype not in TORCHAO_FORMATS:
        raise wrong("weight", f"is {codes.dtype}; int8, float8_e4m3fn and float8_e5m2 are read")
    rows, columns = codes.shape
    grid = _grid(scale, rows, wrong)
    if zero is not None:
        if zero.numel() != scale.numel():
            raise wrong("weight_zero_point", f"is {tuple(zero.shape)} beside scales {tuple(scale.shape)}")
        whole = not zero.is_floating_point() or bool((zero.float() == zero.float().round()).all())
        if not whole or (codes.dtype != torch.int8 and bool((zero.float() != 0).any())):
            raise wrong("weight_zero_point", "is no integer" if not whole else "is not 0 beside numbers of fp8")
        zero = None if codes.dtype != torch.int8 else _grid(zero.to(torch.int32), rows, wrong)
    groups = parts.get("weight_g_idx")
    if groups is not None and bool((groups >= 0).all()):  # -1: the columns are in order
        if tuple(groups.shape) != (columns,) or bool((groups >= grid.shape[1]).any()):
            raise wrong("weight_g_idx", f"must name one of {grid.shape[1]} groups for each of {columns} columns")
        numbers = codes.float() if zero is None else codes.float() - zero.float()[:, groups.long()]
        return numbers * grid.float()[:, groups.long()]
    if columns % grid.shape[1]:
        raise wrong("weight_scale", f"is {tuple(scale.shape)}, which is no grid over groups of {columns} columns")
    return TorchaoWeight(codes, grid.float().contiguous(), zero)


def _unpacked(parts: Mapping[str, Tensor], wrong: Any) -> tuple[Tensor, Tensor | None]:
    """(codes (N, K), int8, zero points (N, groups), int32, or None) of "pack-quantized"."""
    packed, shape, zero = parts["codes"], parts.get("weight_shape"), parts.get("weight_zero_point")
    if packed.dtype != torch.int32 or shape is None or shape.numel() != 2:
        raise wrong("weight_packed", f"is {packed.dtype} and must be int32, with a weight_shape of two numbers")
    rows, columns = (int(one) for one in shape.flatten())
    bits = next((one for one in (4, 8) if packed.shape[1] == -(-columns // (32 // one))), None)
    if bits is None or packed.shape[0] != rows:
        raise wrong("weight_packed", f"is {tuple(packed.shape)} for ({rows}, {columns}) numbers; 4 and 8 bits are read")
    half = 2 ** (bits - 1)
    codes = (unpack_int32(packed.t(), bits)[:, :columns].to(torch.int16) - half).to(torch.int8)
    if zero is None or zero.dtype != torch.int32:
        return codes, zero
    if zero.shape[0] != -(-rows // (32 // bits)):
        raise wrong("weight_zero_point", f"is {tuple(zero.shape)} for {rows} rows in {bits} bits")
    return codes, unpack_int32(zero, bits)[:, :rows].t().to(torch.int32) - half


def _grid(scale: Tensor, rows: int, wrong: Any) -> Tensor:
    """(N, groups) of one scale, of rows, groups, or blocks of rows."""
    grid = scale.reshape(1, 1) if scale.numel() == 1 else scale[:, None] if scale.dim() == 1 else scale
    if grid.dim() != 2 or 0 in grid.shape or rows % grid.shape[0]:
        raise wrong("weight_scale", f"is {tuple(scale.shape)}, which is no grid over {rows} rows")
    return grid.repeat_interleave(rows // grid.shape[0], 0)
