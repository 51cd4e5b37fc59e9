"""llama.cpp's blocks of quantized columns, as GGUF files hold them: codes and scales of a block side by side.

Layouts are those of ggml-quants.c (`block_q8_0`, `block_q4_0`, `block_q4_K`, `block_q6_K`); d and dmin are float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """columns: of the weight. nbytes: that hold them."""

    columns: int
    nbytes: int


BLOCKS = {"q8_0": Block(32, 34), "q4_0": Block(32, 18), "q4_k": Block(256, 144), "q6_k": Block(256, 210)}


def decode_blocks(data: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """(N, stored) uint8 -> the weight (N, K), computed in float32 (float64 for float64) and rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = data.reshape(data.shape[0], -1, BLOCKS[format].nbytes)
    return _DECODE[format](blocks, wide).flatten(1).to(dtype)


def _half(blocks: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
    """The float16 at byte `start` of each block: (N, blocks, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).to(dtype)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.int8)


def _q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, 32 int8."""
    return _signed(blocks[..., 2:]).to(dtype) * _half(blocks, 0, dtype)


def _q4_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, 16 bytes: columns 0 to 15 in the lower bits, 16 to 31 in the upper, all 8 too large."""
    codes = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    return (codes.to(dtype) - 8.0) * _half(blocks, 0, dtype)


def _q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, dmin, 12 bytes of 8 scales and 8 minima in 6 bits, 128 bytes of codes: 32 columns each, two in a byte."""
    small, large, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([small & 63, rest & 15 | small >> 6 << 4], -1).to(dtype) * _half(blocks, 0, dtype)
    minima = torch.cat([large & 63, rest >> 4 | large >> 6 << 4], -1).to(dtype) * _half(blocks, 2, dtype)
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3, -2)
    return (codes.to(dtype) * scales[..., None] - minima[..., None]).flatten(-2)


def _q6_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """128 bytes of lower 4 bits, 64 of upper 2, 16 int8 scales, d: codes are 32 too large, a scale has 16 columns."""
    lower = blocks[..., :128].unflatten(-1, (2, 1, 64))
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat([lower & 15, lower >> 4], -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # (.., halves, 4, 32)
    high = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (low | high << 4).flatten(-3).unflatten(-1, (16, 16))
    scales = _signed(blocks[..., 192:208]).to(dtype) * _half(blocks, 208, dtype)
    return ((codes.to(dtype) - 32.0) * scales[..., None]).flatten(-2)


_DECODE = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q6_k": _q6_k}
