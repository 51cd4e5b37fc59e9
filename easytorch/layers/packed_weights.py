"""Weights as GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) checkpoints pack them into int32.

Both give each group of input columns of a linear layer (out N, in K) a scale and a zero point: the weight is
(code - zero) * scale, of codes in 2, 3, 4 or 8 bits.

GPTQ: qweight (K * bits / 32, N), packed along K; qzeros (groups, N * bits / 32), packed along N, less one; scales
(groups, N); g_idx (K,), the group of each column, which are in no order where columns were quantized by activation.
AWQ: qweight (K, N / 8) and qzeros (groups, N / 8), packed along N, eight codes in the order of its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.formats import pack

# Which of eight codes in an int32 of AWQ's comes first, second, ...
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class PackedWeight(NamedTuple):
    """codes (N, K) and zero (N, groups), uint8; scale (N, groups), float32; groups (K,), of each column."""

    codes: Tensor
    zero: Tensor
    scale: Tensor
    groups: Tensor
    bits: int

    def dequantized(self) -> Tensor:
        """(N, K), float32."""
        scale, zero = self.scale[:, self.groups], self.zero[:, self.groups]
        return (self.codes.float() - zero.float()) * scale

    def parts(self, group_size: int) -> dict[str, Tensor] | None:
        """The tensors of a `QuantizedLinear` of "affine", or None where its columns or numbers are others.

        Of 8 bits it has no zero point but 128.
        """
        if not torch.equal(self.groups, torch.arange(len(self.groups)) // group_size):
            return None
        parts = {"scale_bits": self.scale.contiguous().view(torch.int32)}
        if self.bits == 8:
            if not bool((self.zero == 128).all()):
                return None
            return parts | {"codes": (self.codes.to(torch.int16) - 128).to(torch.int8)}
        return parts | {"codes": pack(self.codes), "zero": self.zero.contiguous()}


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 (R, C), codes packed from the lowest bit along the first dimension -> uint8 (C, R * 32 // bits)."""
    stream = packed.t().contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 3:  # eight codes in three bytes
        shifts = torch.arange(8, dtype=torch.uint8)
        ones = (stream[..., None] >> shifts & 1).flatten(-2).unflatten(-1, (-1, 3))
        return ones[..., 0] | ones[..., 1] << 1 | ones[..., 2] << 2
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (stream[..., None] >> shifts & 2**bits - 1).flatten(-2)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, group_size: int, *, less_one: bool
) -> PackedWeight:
    """A weight of a GPTQ checkpoint. less_one: zero points are stored less one, as all but "gptq_v2" do."""
    codes, zero = unpacked(qweight, bits), unpacked(qzeros.t(), bits)[:, : scales.shape[1]]
    if less_one:
        zero = zero + 1 & 2**bits - 1
    groups = torch.arange(codes.shape[1]) // group_size if g_idx is None else g_idx.long()
    return PackedWeight(codes, zero.t(), scales.t().float(), groups, bits)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> PackedWeight:
    """A weight of an AWQ checkpoint of version "gemm": 4 bits."""
    codes, zero = (
        unpacked(one.t(), 4).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2) for one in (qweight, qzeros)
    )
    groups = torch.arange(len(codes)) // group_size
    return PackedWeight(codes.t(), zero.t(), scales.t().float(), groups, 4)
