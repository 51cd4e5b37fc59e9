"""Weights as the checkpoints of other libraries hold them: GPTQ's, AWQ's, torchao's, and four-bit floats.

GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) pack codes into int32. Both give each group of input columns of a
linear layer (out N, in K) a scale and a zero point: the weight is (code - zero) * scale, of codes in 2, 3, 4 or 8 bits.

GPTQ: qweight (K * bits / 32, N), packed along K; qzeros (groups, N * bits / 32), packed along N, minus one; scales
(groups, N); g_idx (K,), the group of each column, which are in no order where columns were quantized by activation.
AWQ: qweight (K, N / 8) and qzeros (groups, N / 8), packed along N, eight codes in the order of its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.quantized_matmul.formats import FP4_LEVELS, pack, unpack
from easytorch.layers.quantized_formats import FormatSettings

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

    def ordered(self, group_size: int) -> bool:
        """Whether the columns of some group are not adjacent."""
        return not torch.equal(self.groups, torch.arange(len(self.groups)) // group_size)

    def parts(self, group_size: int, ordered: bool = False) -> dict[str, Tensor] | None:
        """The tensors of a `QuantizedLinear` of "affine", or None where that format has no such groups or codes.

        8 bits require a zero point of 128. ordered: with `order`, which sorts the columns by groups.
        """
        codes, parts = self.codes, {"scale_bits": self.scale.contiguous().view(torch.int32)}
        if ordered:
            order = self.groups.argsort(stable=True)
            if not torch.equal(self.groups[order], torch.arange(len(order)) // group_size):
                return None
            codes, parts["order"] = codes[:, order], order.to(torch.int32)
        elif self.ordered(group_size):
            return None
        if self.bits == 8:
            if not bool((self.zero == 128).all()):
                return None
            return parts | {"codes": (codes.to(torch.int16) - 128).to(torch.int8)}
        return parts | {"codes": pack(codes), "zero": self.zero.contiguous()}


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
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
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group_size: int,
    *,
    zeros_minus_one: bool,
) -> PackedWeight:
    """A weight of a GPTQ checkpoint.

    zeros_minus_one: qzeros are zero points minus one, as in every format but "gptq_v2".
    """
    codes, zero = unpack_int32(qweight, bits), unpack_int32(qzeros.t(), bits)[:, : scales.shape[1]]
    if zeros_minus_one:
        zero = zero + 1 & 2**bits - 1
    groups = torch.arange(codes.shape[1]) // group_size if g_idx is None else g_idx.long()
    return PackedWeight(codes, zero.t(), scales.t().float(), groups, bits)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> PackedWeight:
    """A weight of an AWQ checkpoint of version "gemm": 4 bits."""
    codes, zero = (
        unpack_int32(one.t(), 4).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2) for one in (qweight, qzeros)
    )
    groups = torch.arange(len(codes)) // group_size
    return PackedWeight(codes.t(), zero.t(), scales.t().float(), groups, 4)


# torchao's codes, and the format of a `QuantizedLinear` that has them.
TORCHAO_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}


class TorchaoWeight(NamedTuple):
    """A weight of torchao: codes (N, K), int8 or fp8; scale (N, groups), float32; zero (N, groups), int32, or None."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def group_size(self) -> int:
        return int(self.codes.shape[1] // self.scale.shape[1])

    def dequantized(self) -> Tensor:
        """(N, K), float32."""
        numbers = self.codes.float().unflatten(1, (-1, self.group_size))
        numbers = numbers if self.zero is None else numbers - self.zero[..., None]
        return (numbers * self.scale[..., None]).flatten(1)

    def settings(self) -> FormatSettings | None:
        """The format of a `QuantizedLinear` with these codes; None where there is none."""
        size = None if self.scale.shape[1] == 1 else self.group_size
        symmetric = self.zero is None or not bool(self.zero.any())
        if self.codes.dtype != torch.int8:
            return FormatSettings(TORCHAO_FORMATS[self.codes.dtype], size)
        if self._fits_four_bits():
            return FormatSettings("int4", size) if symmetric else FormatSettings("affine", size, 4)
        return FormatSettings("int8", size) if symmetric else None

    def parts(self, settings: FormatSettings) -> dict[str, Tensor]:
        """The tensors of a `QuantizedLinear` of `settings`, which are `settings()`."""
        parts = {"scale_bits": self.scale.contiguous().view(torch.int32)}
        if settings.format in ("int4", "affine"):
            parts["codes"] = pack(self.codes.to(torch.int16) + 8)
        else:
            integers = self.codes.dtype == torch.int8
            parts["codes"] = self.codes.contiguous() if integers else self.codes.contiguous().view(torch.uint8)
        if settings.format == "affine":
            assert self.zero is not None
            parts["zero"] = (self.zero + 8).to(torch.uint8)
        return parts

    def _fits_four_bits(self) -> bool:
        ends = [self.codes] if self.zero is None else [self.codes, self.zero]
        return all(bool(((one >= -8) & (one <= 7)).all()) for one in ends)


class Fp4Weight(NamedTuple):
    """A weight of E2M1 floats: codes (..., N, K / 2), uint8, the even column in the upper bits; scale
    (..., N, groups), float32. Experts may lie side by side in the first dimension."""

    codes: Tensor
    scale: Tensor

    @property
    def group_size(self) -> int:
        return 2 * int(self.codes.shape[-1]) // int(self.scale.shape[-1])

    @property
    def format(self) -> str:
        """The format of a `QuantizedLinear` with these groups."""
        return "nvfp4" if self.group_size == 16 else "mxfp4"

    def dequantized(self) -> Tensor:
        """(..., N, K), float32."""
        codes = unpack(self.codes.flatten(0, -2), 2 * self.codes.shape[-1])
        numbers = torch.tensor(FP4_LEVELS)[codes.to(torch.int32)].view(*self.codes.shape[:-1], -1, self.group_size)
        return (numbers * self.scale[..., None]).flatten(-2)

    def parts(self) -> dict[str, Tensor]:
        """The tensors of a `QuantizedLinear` of `format`."""
        return {"codes": self.codes, "scale_bits": self.scale.contiguous().view(torch.int32)}


def fp4_weight(packed: Tensor, scale: Tensor, global_scale: Tensor | None = None) -> Fp4Weight:
    """packed (..., K / 2), uint8, the even column in the lower bits; scale (..., groups): uint8, the exponents of
    powers of two plus 127 (E8M0), or fp8, which global_scale divides."""
    codes = packed << 4 | packed >> 4
    if scale.dtype == torch.uint8:
        numbers = torch.exp2(scale.to(torch.float64) - 127.0).float()
        return Fp4Weight(codes, torch.where(scale == 255, torch.nan, numbers))
    divisor = torch.ones(()) if global_scale is None else global_scale.float()
    return Fp4Weight(codes, scale.float() / divisor)


def from_int4_tensor(packed: Tensor, scale: Tensor, zero: Tensor) -> TorchaoWeight | Tensor:
    """torchao's `Int4Tensor` (FBGEMM's layout): packed (N, K / 2), signed, the even column in the lower bits; scale and
    zero (groups, N): numbers are code * scale + zero. Where every zero is 0 codes, else the decoded weight (N, K)."""
    bytes_ = packed.view(torch.uint8)
    codes = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2)
    signed = ((codes ^ 8).to(torch.int16) - 8).to(torch.int8)
    if not bool(zero.any()):
        return TorchaoWeight(signed, scale.t().float().contiguous(), None)
    size = signed.shape[1] // scale.shape[0]
    groups = signed.float().unflatten(1, (-1, size))
    return (groups * scale.t().float()[..., None] + zero.t().float()[..., None]).flatten(1)
