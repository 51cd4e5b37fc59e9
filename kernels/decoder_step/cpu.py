"""The halves of a decoder layer by the operators in C++ (cpu*.cpp here), each of one parallel region; and many layers
of both in one call.

Operator by operator a layer of one token is about twenty calls, of which five wait for their threads. Inference only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.cpu.inference import ABSENT, DTYPES
from easytorch.kernels.decoder_step.native import (
    ACTIVATIONS,
    AnyProjection,
    AttentionWeights,
    FeedForwardWeights,
    LayerWeights,
    PageSlots,
    PagesOfLayer,
    Projection,
    QuantizedProjection,
    Slot,
    SlotOfLayer,
)
from easytorch.kernels.linear import preference
from easytorch.kernels.quantized_matmul import cpu as quantized
from easytorch.kernels.rms_norm.cpu import SMALLEST_ROW

# Passed for absent angles.
_NO_ANGLES = {dtype: torch.empty(1, 1, 0, dtype=dtype) for dtype in DTYPES}
# The least numbers of a float32 weight, whatever the table of `linear` says: see `SMALLEST_WEIGHT` of layers/linear.py.
SMALLEST_FLOAT32 = 2**20
_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
# A projection is dense or has a quantized format, by its number.
_DENSE = -1
_NO_SCALE, _NO_ZERO = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.uint8)
_NO_MASK = torch.empty(0, dtype=torch.bool)
# torch hands lists of tensors to operators of its stable interface since 2.10.
TAKES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def takes(x: Tensor) -> bool:
    """True where a half of a layer may be in C++ for hidden states x (B, T, D), if its weights are taken too.

    It may build the library.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and processor.AVX2  # where it was measured
        and x.dtype in ABSENT
        and x.dim() == 3
        and 0 < x.shape[0] * x.shape[1] <= preference.FEW_ROWS[x.dtype][0]
        and x.shape[2] >= SMALLEST_ROW
        and type(x) is Tensor
        and x.is_cpu
        and x.is_contiguous()
        and inference.refusal((x,)) is None
    )


def takes_product(x: Tensor, *projections: AnyProjection) -> bool:
    """True where the projections, of one input, are those that the operators of `linear` and `quantized_matmul` take:
    large and plain."""
    dtype, numbers, least = x.dtype, 0, preference.FEW_ROWS[torch.bfloat16][1]
    for one in projections:
        if isinstance(one, QuantizedProjection):
            if not quantized.takes_codes(one.codes, one.scale_bits, one.zero, one.group_size):
                return False
            rows, columns = one.rows, one.columns
        else:
            weight = one.weight
            if weight.dtype is not dtype or not weight.is_cpu or weight.dim() != 2 or not weight.is_contiguous():
                return False
            rows, columns = weight.shape
            least = SMALLEST_FLOAT32 if dtype is torch.float32 else preference.FEW_ROWS[dtype][1]
        numbers += rows * columns
        bias = one.bias
        if bias is not None and (
            bias.dtype is not dtype or bias.shape != (rows,) or not bias.is_cpu or not bias.is_contiguous()
        ):
            return False
    return numbers >= least


def attention_step(
    x: Tensor,
    weights: AttentionWeights,
    angles: tuple[Tensor, Tensor] | None,
    cache: Slot,
    call: AttentionCall,
    *,
    level: int = library.BEST,
) -> Tensor:
    """The definition's (native.py), for x, weights and cache of one dtype, contiguous."""
    return torch.ops.easytorch_cpu.attention_step.default(
        *_inputs(x, weights, angles),
        cache.keys,
        cache.values,
        *call,
        cache.first,
        cache.slot,
        cache.end,
        torch.get_num_threads(),
        level,
    )


def attention_step_pages(
    x: Tensor,
    weights: AttentionWeights,
    angles: tuple[Tensor, Tensor] | None,
    pages: PageSlots,
    call: AttentionCall,
    *,
    level: int = library.BEST,
) -> Tensor:
    """The definition's (native.py), for x, weights and pages of one dtype, contiguous; it checks the tables."""
    return torch.ops.easytorch_cpu.attention_step_pages.default(
        *_inputs(x, weights, angles),
        *pages,
        *call,
        torch.get_num_threads(),
        level,
    )


def _inputs(x: Tensor, weights: AttentionWeights, angles: tuple[Tensor, Tensor] | None) -> list[Any]:
    """What both take at first."""
    cos, sin = (_NO_ANGLES[x.dtype],) * 2 if angles is None else angles
    none = ABSENT[x.dtype]
    query_norm = none if weights.query_norm is None else weights.query_norm
    key_norm = none if weights.key_norm is None else weights.key_norm
    projections = flat(none, weights.query, weights.key, weights.value, weights.output)
    return [x, weights.norm, *projections, query_norm, key_norm, weights.eps, weights.head_eps, cos, sin]


def feed_forward_step(x: Tensor, weights: FeedForwardWeights, *, level: int = library.BEST) -> Tensor:
    """The definition's (native.py), for x and weights of one dtype, contiguous."""
    return torch.ops.easytorch_cpu.feed_forward_step.default(
        x,
        weights.norm,
        *flat(ABSENT[x.dtype], weights.gate, weights.up, weights.down),
        weights.eps,
        _CODES[weights.activation],
        torch.get_num_threads(),
        level,
    )


class PackedLayers(NamedTuple):
    """`LayerWeights` as `decoder_layers` takes them, for hidden states of a dtype; made once for many calls."""

    tensors: list[Tensor]
    formats: list[int]
    numbers: list[float]


def pack_layers(layers: Iterable[LayerWeights], dtype: torch.dtype) -> PackedLayers:
    """In the order in which the operators read: by layer, and of each layer by type."""
    none = ABSENT[dtype]
    packed = PackedLayers([], [], [])

    def add(*values: Any) -> None:
        for value in values:
            kept: list[Any] = packed.tensors
            if not isinstance(value, Tensor):
                kept = packed.numbers if isinstance(value, float) else packed.formats
            kept.append(value)

    def project(*projections: AnyProjection) -> None:
        for one in projections:
            weight, bias, scale, zero, format, *sizes = flat(none, one)
            add(weight, bias, format)
            if format != _DENSE:
                add(scale, zero, *sizes)

    for attention, network, scale, softcap, sinks in layers:
        add(attention.norm)
        project(attention.query, attention.key, attention.value, attention.output)
        add(*(none if one is None else one for one in (attention.query_norm, attention.key_norm)))
        add(attention.eps, attention.head_eps)
        add(none if sinks is None else sinks, scale, 0.0 if softcap is None else softcap)
        add(network.norm)
        project(network.gate, network.up, network.down)
        add(network.eps, _CODES[network.activation])
    return packed


def decoder_layers(
    x: Tensor, layers: PackedLayers, memory: Iterable[SlotOfLayer], *, level: int = library.BEST
) -> Tensor:
    """The definition's (native.py), of slots, for x, weights and caches of one dtype, contiguous."""
    tensors: list[Tensor] = []
    places: list[int] = []
    no_angles = (_NO_ANGLES[x.dtype],) * 2
    for slot, angles, mask in memory:
        keys, values, first, at, end = slot
        tensors += no_angles if angles is None else angles
        tensors += (keys, values, _NO_MASK if mask is None else mask)
        places += (first, at, end)
    return torch.ops.easytorch_cpu.decoder_layers.default(x, *layers, tensors, places, torch.get_num_threads(), level)


def decoder_layers_pages(
    x: Tensor, layers: PackedLayers, memory: Iterable[PagesOfLayer], *, level: int = library.BEST
) -> Tensor:
    """The definition's (native.py), of pages, for x, weights and pages of one dtype, contiguous."""
    tensors: list[Tensor] = []
    windows: list[int] = []
    no_angles = (_NO_ANGLES[x.dtype],) * 2
    for pages, angles, left in memory:
        tensors += no_angles if angles is None else angles
        tensors += pages
        windows.append(-1 if left is None else left)
    return torch.ops.easytorch_cpu.decoder_layers_pages.default(
        x, *layers, tensors, windows, torch.get_num_threads(), level
    )


def flat(none: Tensor, *projections: AnyProjection) -> list[Any]:
    """The fields of the projections as the operators take them (cpu_products.h)."""
    fields: list[Any] = []
    for one in projections:
        bias = none if one.bias is None else one.bias
        if isinstance(one, Projection):
            fields += (one.weight, bias, _NO_SCALE, _NO_ZERO, _DENSE, 0, 0)
        else:
            zero = _NO_ZERO if one.zero is None else one.zero
            number = quantized.NUMBERS[one.format]
            fields += (one.codes, bias, one.scale_bits, zero, number, one.columns, one.group_size)
    return fields
