"""The formats that weights are quantized to, in the terms of the `quantized_matmul` operation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.formats import FORMATS, pack
from easytorch.kernels.quantized_matmul.formats import storage as stored_as
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, fp4_codes, quantize

# format: the operation's format that holds it, and the columns that share a scale (None: a row)
STORAGE: dict[str, tuple[str, int | None]] = {
    "int8": ("int8", 64),
    "int4": ("int4", 128),
    "nf4": ("nf4", 64),
    "fp8": ("fp8_e4m3fn", None),
    "fp8_e5m2": ("fp8_e5m2", None),
    "mxfp8": ("fp8_e4m3fn", 32),
    "mxfp4": ("fp4_e2m1", 32),
    "nvfp8": ("fp8_e4m3fn", 16),
    "nvfp4": ("fp4_e2m1", 16),
    "affine": ("int4", 64),
    "ternary": ("int4", 64),
    "binary": ("int4", 64),
}

# llama.cpp's blocks that layers keep as a GGUF file has them. The others are decoded as a file is loaded: one row of x
# times them takes longer than a bfloat16 product (kernels/quantized_matmul/cpu.py).
_DECODED = ("q5_0", "q5_1", "q2_k", "q3_k", "q5_k", "iq4_xs")
GGUF_BLOCKS = tuple(name for name in BLOCKS if name not in _DECODED)


class FormatSettings(NamedTuple):
    """format: a name of `STORAGE`, or of `BLOCKS`: those of a GGUF file. group_size: columns that share a scale, None
    for a row. bits: of affine. ordered: columns are grouped in an order of their own (GPTQ's act-order)."""

    format: str
    group_size: int | None
    bits: int | None = None
    ordered: bool = False

    @property
    def storage(self) -> str:
        """The name of the format in `quantized_matmul`."""
        if self.format in BLOCKS:
            return self.format
        return "int8" if self.format == "affine" and (self.bits or 4) > 4 else STORAGE[self.format][0]

    def columns(self, width: int) -> int:
        """How many of a weight's `width` columns share a scale."""
        return width if self.group_size is None else min(self.group_size, width)

    def __str__(self) -> str:
        if self.format in BLOCKS:
            return f"{self.format} blocks"
        groups = "rows" if self.group_size is None else f"groups of {self.group_size}"
        groups += " in an order of their own" if self.ordered else ""
        return f"{self.format}{'' if self.bits is None else f' of {self.bits} bits'} in {groups}"


def quantize_weight(weight: Tensor, settings: FormatSettings) -> QuantizedWeight:
    """weight (N, K), floating -> codes of the format.

    int8, int4, nf4, fp8: the operation's own. mxfp8 and mxfp4: scales that are powers of two. nvfp8 and nvfp4: scales
    of E4M3 beside one factor for the weight. mxfp4, nvfp4: numbers of E2M1. affine: from the smallest to
    the largest number of a group up to 4 bits, symmetric above. ternary: -s, 0, s (arXiv:1605.04711); binary: -s, s,
    s the mean magnitude. `ValueError` for a weight with infinities or NaN.
    """
    size, name = settings.columns(weight.shape[1]), settings.format
    if settings.ordered and not weight.is_meta:
        raise ValueError("desc_act is of GPTQ checkpoints, which hold the order of columns; quantize without it")
    if weight.is_meta or name in BLOCKS:
        return _without_values(weight, settings)
    if name in ("int8", "int4", "nf4", "fp8", "fp8_e5m2"):
        return quantize(weight, name, size, search=True)
    if name == "affine" and (settings.bits or 4) == 4:
        return quantize(weight, "int4", size, symmetric=False)
    if not bool(weight.isfinite().all()):
        raise ValueError("quantize: the weight has infinities or NaN")
    numbers = weight.detach().to(torch.float32)
    groups = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % size)).unflatten(1, (-1, size))
    if name == "affine":
        return _affine(groups, numbers.shape, settings)
    if name in ("ternary", "binary"):
        return _signs(groups, numbers, settings)
    return _floats(groups, numbers.shape, settings)


def _without_values(weight: Tensor, settings: FormatSettings) -> QuantizedWeight:
    """A weight for a checkpoint to fill: tensors of the right shapes on the meta device."""
    if not weight.is_meta:
        raise ValueError(
            f"{settings.format} blocks are read from GGUF files (gguf_file=); nothing is quantized to them"
        )
    rows, columns = weight.shape
    width, dtype = stored_as(settings.storage, columns)
    data = torch.empty(rows, width, dtype=dtype, device="meta")
    if settings.format in BLOCKS:
        return _made(data, torch.empty(1, 1, dtype=torch.float32, device="meta"), None, weight.shape, settings)
    kind = FORMATS[settings.storage]
    groups = -(-columns // settings.columns(columns))
    scale = torch.empty(rows, groups, dtype=torch.float32, device="meta")
    has_zero = settings.format == "affine" and kind.packed
    zero = torch.empty(rows, groups, dtype=torch.uint8, device="meta") if has_zero else None
    return _made(data, scale, zero, weight.shape, settings)


def _affine(groups: Tensor, shape: torch.Size, settings: FormatSettings) -> QuantizedWeight:
    bits, columns = settings.bits or 4, shape[1]
    if bits > 4:
        levels = 2 ** (bits - 1) - 1
        scale = groups.abs().amax(-1) / levels
        codes = (groups / _divisor(scale)[..., None]).round().clamp(-levels, levels)
        return _made(codes.flatten(1)[:, :columns].to(torch.int8), scale, None, shape, settings)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / _divisor(scale)).round().clamp(0, 2**bits - 1)
    codes = ((groups / _divisor(scale)[..., None]).round() + zero[..., None]).clamp(0, 2**bits - 1)
    return _made(pack(codes.flatten(1)[:, :columns]), scale, zero.to(torch.uint8), shape, settings)


def _signs(groups: Tensor, numbers: Tensor, settings: FormatSettings) -> QuantizedWeight:
    """Codes 7, 8 and 9 of int4: -1, 0 and 1."""
    columns = numbers.shape[1]
    counts = torch.nn.functional.pad(torch.ones_like(numbers), (0, groups[0].numel() - columns))
    counts = counts.unflatten(1, groups.shape[1:])
    magnitudes = groups.abs()
    mean = magnitudes.sum(-1) / counts.sum(-1)
    if settings.format == "binary":
        signs, scale = torch.where(groups < 0, -1.0, 1.0), mean
    else:
        kept = (magnitudes > 0.7 * mean[..., None]) * counts
        scale = (magnitudes * kept).sum(-1) / kept.sum(-1).clamp(min=1.0)
        signs = groups.sign() * kept
    return _made(pack((signs + 8).flatten(1)[:, :columns]), scale, None, numbers.shape, settings)


def _floats(groups: Tensor, shape: torch.Size, settings: FormatSettings) -> QuantizedWeight:
    four_bits = settings.format.endswith("4")
    largest = 6.0 if four_bits else 448.0
    needed = groups.abs().amax(-1) / largest
    if settings.format.startswith("mx"):
        # the power of two that brings the largest number to the format's largest exponent, as in the specification
        exponent = torch.floor(torch.log2(needed.clamp(min=2.0**-126) * largest)) - (2 if four_bits else 8)
        scale = torch.exp2(exponent.clamp(-126, 127))
    else:
        factor = needed.amax() / 448.0
        scale = (needed / _divisor(factor)).to(torch.float8_e4m3fn).to(torch.float32) * factor
    scaled = groups / _divisor(scale)[..., None]
    flat = scaled.flatten(1)[:, : shape[1]].clamp(-largest, largest)
    if not four_bits:
        return _made(flat.to(torch.float8_e4m3fn), scale, None, shape, settings)
    return _made(pack(fp4_codes(flat)), scale, None, shape, settings)


def _made(
    codes: Tensor, scale: Tensor, zero: Tensor | None, shape: torch.Size, settings: FormatSettings
) -> QuantizedWeight:
    size = settings.columns(shape[1])
    return QuantizedWeight(codes.contiguous(), scale, zero, settings.storage, (shape[0], shape[1]), size)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0.0, 1.0, scale)
