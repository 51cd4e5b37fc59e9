"""`QuantizedWeight`, tensors of codes and scales with their format, and `quantize`, which makes one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree

from easytorch.kernels.quantized_matmul import cpu_layout
from easytorch.kernels.quantized_matmul.formats import (
    FORMATS,
    FP4_LEVELS,
    NF4_LEVELS,
    decode,
    format_of,
    pack,
    spread,
    storage,
    unpack,
)
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS, decode_blocks
from easytorch.kernels.quantized_matmul.interleaved import interleaves, is_interleaved

_TENSORS = ("data", "scale", "zero", "packed", "packed_scale")


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight (N, K) in few bits: dequantized it is (code - zero) * scale, each group of columns with its own.

    data: int8 and fp8: (N, K) of that dtype; int4, nf4, fp4: (N, ceil(K / 2)) uint8, the even column in the upper bits.
    Or the same bytes with their rows interleaved by 16 (interleaved.py), (N / 16, 16 times as wide), for a CPU alone.
    scale: float32 (N, ceil(K / group_size)), or (1, 1) for one scale in all.
    zero: of int4 that is not symmetric: uint8 codes of 0.0, shaped like scale; else None (int4: 8).
    format: a name of `FORMATS`, or of `BLOCKS` (llama.cpp's), whose data, uint8, hold the scales too (`of_blocks`).
    shape: (N, K). group_size: columns that share a scale; the last group may be shorter.
    packed, packed_scale: int4 once more, as ATen's CPU kernel reads it, where `prepacked` has made it.

    A pytree: torch.compile, torch.export and torch.func see its tensors.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    format: str
    shape: tuple[int, int]
    group_size: int
    packed: torch.Tensor | None = None
    packed_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        width, dtype = storage(self.format, columns)
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        one = tuple(self.data.shape) == (rows, width) or self._interleaved(width)
        if not one or self.data.dtype != dtype:
            raise ValueError(
                f"{self.format} of shape {tuple(self.shape)} is stored as {(rows, width)} {dtype}, got "
                f"{tuple(self.data.shape)} {self.data.dtype}"
            )
        grouped, scale = (rows, -(-columns // self.group_size)), tuple(self.scale.shape)
        if scale != (1, 1) and scale != grouped:
            raise ValueError(f"scale must be {grouped} for groups of {self.group_size}, or (1, 1), got {scale}")
        if self.scale.dtype != torch.float32:
            raise ValueError(f"scale must be float32, got {self.scale.dtype}")
        if self.format in BLOCKS and scale != (1, 1):
            raise ValueError(f"{self.format} has its scales in its blocks: scale must be (1, 1), got {scale}")
        if self.zero is None:
            return
        if self.format != "int4":
            raise ValueError(f"only int4 has a zero point, got one for {self.format}")
        if tuple(self.zero.shape) != scale or self.zero.dtype != torch.uint8:
            raise ValueError(f"zero must be {scale} uint8, got {tuple(self.zero.shape)} {self.zero.dtype}")

    def _interleaved(self, width: int) -> bool:
        (rows, columns), shape = self.shape, tuple(self.data.shape)
        return shape == (rows // 16, 16 * width) and interleaves(self.format, rows, columns)

    @property
    def interleaved(self) -> bool:
        """Whether the rows of `data` are interleaved by 16."""
        return is_interleaved(self.data, self.format, self.shape[1])

    def separated(self) -> QuantizedWeight:
        """The same weight with the rows of `data` one after another."""
        if not self.interleaved:
            return self
        return replace(self, data=cpu_layout.separate(self.data, self.format, self.shape[1]))

    @classmethod
    def of_blocks(cls, data: torch.Tensor, format: str) -> QuantizedWeight:
        """A weight of llama.cpp's blocks: data (N, bytes of a row), uint8."""
        if format not in BLOCKS:
            raise ValueError(f"unknown blocks {format!r}; known: {', '.join(BLOCKS)}")
        columns = data.shape[1] // BLOCKS[format].nbytes * BLOCKS[format].columns
        one = torch.ones(1, 1, dtype=torch.float32, device=data.device)
        return cls(data, one, None, format, (data.shape[0], columns), max(columns, 1))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight (N, K): computed in float32 (float64 for float64), rounded to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        columns = self.shape[1]
        rows = self.separated().data
        if self.format in BLOCKS:
            return (decode_blocks(rows, self.format, wide) * self.scale.to(wide)).to(dtype)
        zero = None if self.zero is None else spread(self.zero, self.group_size, columns)
        numbers = decode(rows, zero, self.format, columns, wide)
        return (numbers * spread(self.scale.to(wide), self.group_size, columns)).to(dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        zero = None if self.zero is None else self.zero.to(device)
        data = self.data if torch.device(device).type == "cpu" else self.separated().data
        return QuantizedWeight(data.to(device), self.scale.to(device), zero, self.format, self.shape, self.group_size)

    def prepacked(self) -> QuantizedWeight:
        """The same weight with a second copy of int4 for ATen's CPU kernel, which serves few rows of bfloat16.

        Returns itself where that kernel does not take it: another format or device, a group that is not 32, 64, 128 or
        256 wide or that K or 16 rows do not divide into. The copy is not part of `to_dict` and `to`.
        """
        if self.interleaved:
            return self.separated().prepacked()
        rows, columns = self.shape
        whole = columns % self.group_size == 0 and self.scale.shape == (rows, columns // self.group_size)
        known = self.format == "int4" and self.group_size in (32, 64, 128, 256) and self.data.device.type == "cpu"
        if not (known and whole and rows % 16 == 0):
            return self
        packed = torch._convert_weight_to_int4pack_for_cpu(unpack(self.data, columns).to(torch.int32), 1)
        # its numbers are (code - 8) * scale + offset
        origin = torch.zeros_like(self.scale) if self.zero is None else 8.0 - self.zero.to(torch.float32)
        packed_scale = torch.stack([self.scale, origin * self.scale], -1).transpose(0, 1).contiguous()
        return replace(self, packed=packed, packed_scale=packed_scale.to(torch.bfloat16))

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.numel() * t.element_size() for t in _tensors(self).values() if t is not None)

    def to_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors only, for safetensors or a state dict: data, scale, zero where there is one, and the settings."""
        settings = json.dumps({"format": self.format, "shape": list(self.shape), "group_size": self.group_size})
        tensors = {"data": self.separated().data, "scale": self.scale, "zero": self.zero}
        found = {prefix + name: tensor for name, tensor in tensors.items() if tensor is not None}
        return {**found, prefix + "settings": torch.tensor(list(settings.encode()), dtype=torch.uint8)}

    @classmethod
    def from_dict(cls, tensors: dict[str, torch.Tensor], prefix: str = "") -> QuantizedWeight:
        """The inverse of `to_dict`; names that do not start with `prefix` are left alone."""
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        absent = {"data", "scale", "settings"} - set(own)
        if absent:
            raise ValueError(f"no quantized weight under {prefix!r}: {', '.join(sorted(absent))} is missing")
        settings = json.loads(bytes(own["settings"].tolist()))
        return cls(
            own["data"], own["scale"], own.get("zero"), settings["format"], tuple(settings["shape"]),
            settings["group_size"],
        )  # fmt: skip


# What int4's largest number of a group may become. -8 uses all codes, 7 is exact for what seven levels hold, beyond 8
# it is clipped.
_INT4_SEARCHED = (-8.0, -7.0, -7.5, -8.5, -9.0, -9.5, 7.0, 7.5, 8.0)


def quantize(
    weight: torch.Tensor,
    format: str,
    group_size: int | str | None = None,
    *,
    symmetric: bool = True,
    search: bool = False,
) -> QuantizedWeight:
    """weight (N, K), floating -> the nearest codes of `format` under scales from the largest magnitude of each group.

    format: "int8", "int4", "nf4", "fp4_e2m1" (alias "fp4"), "fp8_e4m3fn" (alias "fp8") or "fp8_e5m2". group_size:
    columns that share a scale; "row" (or -1) is one a row, "tensor" one in all; None is 128 for int4, 64 for nf4, 32
    for fp4, else a row. symmetric: False gives int4 a zero point, so that it covers the smallest to the largest number
    of a group. search: of symmetric int4, the scale of each group is the one of several, negative ones too, that leaves
    the smallest sum of squared errors; of other formats nothing.

    The error of a number is at most scale / 2 (int4 with zero point: scale, searched: 1.5 |scale|); nf4: 0.152 of the
    group's largest; fp4: scale; fp8: a relative 2**-4 (e4m3fn) or 2**-3 (e5m2), below its normal numbers
    scale * 2**-10 or scale * 2**-17.
    """
    name = format_of(format)
    kind = FORMATS[name]
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"quantize takes a floating weight (N, K), got {tuple(weight.shape)} of {weight.dtype}")
    if not symmetric and name != "int4":
        raise ValueError(f"only int4 has a zero point: {name} with symmetric=False")
    size = _group_size(kind.group_size if group_size is None else group_size, weight.shape[1])
    numbers = weight.detach().to(torch.float32)
    if not bool(numbers.isfinite().all()):
        raise ValueError("quantize: the weight has infinities or NaN")
    groups = numbers.reshape(1, 1, -1) if group_size == "tensor" else _in_groups(numbers, size)
    zero = None
    if search and symmetric and name == "int4":
        scale = _searched(groups)
    elif symmetric:
        scale = groups.abs().amax(-1) / kind.largest
    else:
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        scale = (high - low) / 15.0
        zero = (-low / _divisor(scale)).round().clamp(0, 15).to(torch.uint8)
    columns = weight.shape[1]
    scaled = numbers / spread(_divisor(scale), size, columns)
    data = _encode(scaled, None if zero is None else spread(zero, size, columns), name)
    return QuantizedWeight(data, scale, zero, name, (weight.shape[0], columns), size)


def _searched(groups: torch.Tensor) -> torch.Tensor:
    """int4's scale of each group (N, groups, size) with the least squared error."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = error = torch.empty(0)
    for number in _INT4_SEARCHED:
        scale = largest / number
        rounded = (groups / _divisor(scale)).round_().clamp_(-8, 7).mul_(scale)
        found = rounded.sub_(groups).square_().sum(-1, keepdim=True)
        if number == _INT4_SEARCHED[0]:
            best, error = scale, found
        else:
            best, error = torch.where(found < error, scale, best), torch.minimum(error, found)
    return best[..., 0]


def _group_size(given: int | str | None, columns: int) -> int:
    if given in (None, "row", "tensor", -1):
        return columns
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f'group_size must be a positive number of columns, "row", "tensor" or None, got {given!r}')
    return min(given, columns)


def _in_groups(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """(N, K) -> (N, groups, size), the last group padded with zeros."""
    rows, columns = numbers.shape
    return torch.nn.functional.pad(numbers, (0, -columns % size)).reshape(rows, -1, size)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """A group of zeros has scale 0, and the codes of 0."""
    return torch.where(scale == 0.0, 1.0, scale)


def _encode(scaled: torch.Tensor, zero: torch.Tensor | None, format: str) -> torch.Tensor:
    kind = FORMATS[format]
    if format == "nf4":
        levels = torch.tensor(NF4_LEVELS, device=scaled.device)
        return pack(torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2))
    if format == "fp4_e2m1":
        return pack(fp4_codes(scaled))
    if format == "int4":
        return pack((scaled.round() + (8 if zero is None else zero)).clamp(0, 15))
    if format == "int8":
        return scaled.round().clamp(-127, 127).to(torch.int8)
    return scaled.clamp(-kind.largest, kind.largest).to(kind.dtype)


def fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    """The codes of `FP4_LEVELS` nearest to `numbers`, ties to the even code, as conversions of floats round."""
    levels = torch.tensor(FP4_LEVELS[:8], dtype=numbers.dtype, device=numbers.device)
    halves = (levels[1:] + levels[:-1]) / 2
    magnitudes = numbers.abs()
    codes = torch.bucketize(magnitudes, halves)
    tied = (codes % 2 == 1) & (magnitudes == halves[codes.clamp(max=6)])
    return ((codes + tied) | numbers.signbit().to(codes.dtype) << 3).to(torch.uint8)


def _tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor | None]:
    return {name: getattr(weight, name) for name in _TENSORS}


def _flatten(weight: QuantizedWeight) -> tuple[list[Any], tuple[Any, ...]]:
    return list(_tensors(weight).values()), (weight.format, weight.shape, weight.group_size)


def _unflatten(tensors: Any, settings: tuple[Any, ...]) -> QuantizedWeight:
    # not checked: pytree functions put other objects in place of tensors
    weight = object.__new__(QuantizedWeight)
    for name, value in zip((*_TENSORS, "format", "shape", "group_size"), (*tensors, *settings), strict=True):
        object.__setattr__(weight, name, value)
    return weight


def _flatten_with_keys(weight: QuantizedWeight) -> tuple[list[Any], tuple[Any, ...]]:
    tensors, settings = _flatten(weight)
    keys = (_pytree.GetAttrKey(name) for name in _TENSORS)
    return list(zip(keys, tensors, strict=True)), settings


# torch.load, and with it torch.export.load, reads one back
torch.serialization.add_safe_globals([QuantizedWeight])

_pytree.register_pytree_node(
    QuantizedWeight,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="easytorch.QuantizedWeight",
    to_dumpable_context=lambda settings: list(settings),
    from_dumpable_context=lambda settings: (settings[0], tuple(settings[1]), settings[2]),
)
