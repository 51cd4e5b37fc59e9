"""llama.cpp's blocks of quantized columns, as GGUF files hold them: codes and scales of a block side by side.

Layouts are those of ggml-quants.c (`block_q8_0`, `block_q4_K`, ...); d, dmin and m are float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """columns: of the weight. nbytes: that hold them."""

    columns: int
    nbytes: int


BLOCKS = {
    "q8_0": Block(32, 34), "q4_0": Block(32, 18), "q4_k": Block(256, 144), "q6_k": Block(256, 210),
    "q4_1": Block(32, 20), "q5_0": Block(32, 22), "q5_1": Block(32, 24), "iq4_nl": Block(32, 18),
    "q2_k": Block(256, 84), "q3_k": Block(256, 110), "q5_k": Block(256, 176), "iq4_xs": Block(256, 136),
}  # fmt: skip
# What the codes of iq4_nl and iq4_xs stand for.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(.., 16) -> (.., 32): the lower four bits, then the upper."""
    return torch.cat([codes & 15, codes >> 4], -1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """16 for each of the 32 bits at byte `start` that is set, the lowest first."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks[..., start : start + 4, None] >> bits & 1).flatten(-2) << 4


def _q4_1(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, m, 16 bytes as in q4_0: code * d + m."""
    return _nibbles(blocks[..., 4:]).to(dtype) * _half(blocks, 0, dtype) + _half(blocks, 2, dtype)


def _q5_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, 32 fifth bits, 16 bytes as in q4_0: codes are 16 too large."""
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return (codes.to(dtype) - 16.0) * _half(blocks, 0, dtype)


def _q5_1(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, m, 32 fifth bits, 16 bytes as in q4_0: code * d + m."""
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return codes.to(dtype) * _half(blocks, 0, dtype) + _half(blocks, 2, dtype)


def _levels(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(NONLINEAR, dtype=dtype, device=codes.device)[codes.to(torch.int32)]


def _iq4_nl(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, 16 bytes as in q4_0, of codes for `NONLINEAR`."""
    return _levels(_nibbles(blocks[..., 2:]), dtype) * _half(blocks, 0, dtype)


def _iq4_xs(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, 8 upper 2 bits and lower 4 bits of scales that are 32 too large, 8 times 16 bytes as in iq4_nl."""
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    upper = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    lower = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    scales = ((lower | upper << 4).to(dtype) - 32.0) * _half(blocks, 0, dtype)
    return (_levels(_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))), dtype) * scales[..., None]).flatten(-2)


def _two_bits(codes: torch.Tensor) -> torch.Tensor:
    """64 bytes of a q2_k or q3_k block -> (.., 16, 16): 32 bytes hold the same bits of 4 times 32 columns."""
    halves = codes.unflatten(-1, (2, 1, 32))
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3).unflatten(-1, (16, 16))


def _q2_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """16 bytes of a scale and a minimum in 4 bits, for 16 columns each, 64 of codes, d, dmin."""
    scales = (blocks[..., :16] & 15).to(dtype) * _half(blocks, 80, dtype)
    minima = (blocks[..., :16] >> 4).to(dtype) * _half(blocks, 82, dtype)
    return (_two_bits(blocks[..., 16:80]).to(dtype) * scales[..., None] - minima[..., None]).flatten(-2)


def _q3_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """32 bytes of third bits, 64 of codes, 12 of scales in 6 bits, 32 too large, d. Codes without the bit: less 4."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    third = (blocks[..., None, :32] >> bits[:, None] & 1).flatten(-2).unflatten(-1, (16, 16))
    lower = torch.cat([blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4], -1)
    upper = torch.cat([blocks[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scales = ((lower | upper << 4).to(dtype) - 32.0) * _half(blocks, 108, dtype)
    codes = (_two_bits(blocks[..., 32:96]) | third << 2).to(dtype) - 4.0
    return (codes * scales[..., None]).flatten(-2)


def _q5_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, dmin, scales and minima as in q4_k, 32 bytes of fifth bits, 128 of codes as in q4_k."""
    scales, minima = _scales_and_minima(blocks, dtype)
    pairs = blocks[..., 48:].unflatten(-1, (4, 32))
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., None, 16:48] >> bits[:, None] & 1) << 4
    codes = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3, -2) | fifth
    return (codes.to(dtype) * scales[..., None] - minima[..., None]).flatten(-2)


def _scales_and_minima(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    small, large, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([small & 63, rest & 15 | small >> 6 << 4], -1).to(dtype) * _half(blocks, 0, dtype)
    minima = torch.cat([large & 63, rest >> 4 | large >> 6 << 4], -1).to(dtype) * _half(blocks, 2, dtype)
    return scales, minima


def _q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """d, dmin, 12 bytes of 8 scales and 8 minima in 6 bits, 128 bytes of codes: 32 columns each, two in a byte."""
    scales, minima = _scales_and_minima(blocks, dtype)
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


_DECODE = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q6_k": _q6_k, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "iq4_nl": _iq4_nl, "q2_k": _q2_k, "q3_k": _q3_k, "q5_k": _q5_k, "iq4_xs": _iq4_xs,
}  # fmt: skip
