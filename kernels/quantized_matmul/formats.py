"""The formats of a quantized weight: which codes stand for which numbers, and how they are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS

# NormalFloat4, QLoRA's appendix E (https://arxiv.org/abs/2305.14314) to float32, as bitsandbytes has them.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# E2M1, the four-bit float of the OCP Microscaling formats v1.0 (MXFP4) and of NVFP4: a sign, two bits of exponent, one
# of mantissa.
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# What each of 16 codes stands for, of formats that look it up.
LEVELS = {"nf4": NF4_LEVELS, "fp4_e2m1": FP4_LEVELS}


class Format(NamedTuple):
    """dtype: of the stored codes. packed: two codes a byte. largest: the number that absmax becomes.

    group_size: the default, None for one scale per row.
    """

    dtype: torch.dtype
    packed: bool
    largest: float
    group_size: int | None


FORMATS = {
    "int8": Format(torch.int8, False, 127.0, None),
    "int4": Format(torch.uint8, True, 7.0, 128),
    "nf4": Format(torch.uint8, True, 1.0, 64),
    "fp4_e2m1": Format(torch.uint8, True, 6.0, 32),
    "fp8_e4m3fn": Format(torch.float8_e4m3fn, False, 448.0, None),
    "fp8_e5m2": Format(torch.float8_e5m2, False, 57344.0, None),
}
ALIASES = {"fp8": "fp8_e4m3fn", "fp4": "fp4_e2m1"}


def format_of(name: str) -> str:
    """The canonical name for a name or alias; `ValueError` that lists the known ones."""
    found = ALIASES.get(name, name)
    if found not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join([*FORMATS, *ALIASES])}")
    return found


def storage(format: str, columns: int) -> tuple[int, torch.dtype]:
    """(width, dtype) of the stored data of a weight (N, `columns`); `ValueError` for a format that is not known."""
    if format in BLOCKS:
        block = BLOCKS[format]
        if columns % block.columns:
            raise ValueError(f"{format} has blocks of {block.columns} columns, which do not divide {columns}")
        return columns // block.columns * block.nbytes, torch.uint8
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join([*FORMATS, *BLOCKS])}")
    kind = FORMATS[format]
    return -(-columns // 2) if kind.packed else columns, kind.dtype


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(N, K) of 0..15 -> (N, ceil(K / 2)) uint8, the even column in the upper four bits, as bitsandbytes has it."""
    even = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[1] % 2))
    return even[:, 0::2] << 4 | even[:, 1::2]


def unpack(data: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack`: (N, ceil(K / 2)) uint8 -> (N, K) uint8."""
    return torch.stack([data >> 4, data & 15], -1).flatten(-2)[:, :columns]


def decode(
    data: torch.Tensor, zero: torch.Tensor | None, format: str, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The stored data -> the numbers (N, K) that the scale multiplies. zero: int4's, expanded to (N, K) or (N, 1)."""
    if not FORMATS[format].packed:
        return data.to(dtype)
    codes = unpack(data, columns)
    if format in LEVELS:
        return torch.tensor(LEVELS[format], dtype=dtype, device=data.device)[codes.to(torch.int32)]
    return codes.to(dtype) - (8.0 if zero is None else zero.to(dtype))


def spread(parameter: torch.Tensor, group_size: int, columns: int) -> torch.Tensor:
    """Scales or zeros (N or 1, groups) -> (N or 1, K), or (.., 1) where there is one group."""
    return parameter if parameter.shape[1] == 1 else parameter.repeat_interleave(group_size, 1)[:, :columns]
