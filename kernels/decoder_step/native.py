"""The two halves of a pre-norm decoder layer, for one token of each row, by the operations' definitions.

Legend: B rows, D hidden size, H query heads, K key/value heads, C keys the cache has room for, R rotated numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.decode import native as decode
from easytorch.kernels.glu import native as glu
from easytorch.kernels.linear import native as linear
from easytorch.kernels.quantized_matmul import native as quantized_matmul
from easytorch.kernels.quantized_matmul.formats import storage
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight
from easytorch.kernels.ragged_page import native as ragged_page
from easytorch.kernels.ragged_page.write import write_pages
from easytorch.kernels.rms_norm import native as rms_norm
from easytorch.kernels.rotary import native as rotary

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Projection(NamedTuple):
    """A linear layer: weight (N, K), bias (N,)."""

    weight: Tensor
    bias: Tensor | None = None


class QuantizedProjection(NamedTuple):
    """A linear layer of codes: the fields of a `QuantizedWeight` (N, `columns`), bias (N,).

    scale_bits: the scales, as the bits of float32. rows: N; the codes' may be interleaved.
    """

    codes: Tensor
    scale_bits: Tensor
    zero: Tensor | None
    bias: Tensor | None
    format: str
    columns: int
    group_size: int
    rows: int


AnyProjection = Projection | QuantizedProjection


class AttentionWeights(NamedTuple):
    """norm (D,); query (H * head_dim, D), key and value (K * head_dim, D), output (D, H * head_dim); of heads
    (head_dim,)."""

    norm: Tensor
    query: AnyProjection
    key: AnyProjection
    value: AnyProjection
    output: AnyProjection
    eps: float
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    head_eps: float = 0.0


class FeedForwardWeights(NamedTuple):
    """norm (D,); gate and up (N, D), down (D, N). activation: one of `ACTIVATIONS`."""

    norm: Tensor
    gate: AnyProjection
    up: AnyProjection
    down: AnyProjection
    eps: float
    activation: str = "silu"


class LayerWeights(NamedTuple):
    """Both halves of a layer, and what its attention does with its scores. softcap, sinks: as `AttentionCall`'s."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class Slot(NamedTuple):
    """keys and values (B, K, C, head_dim): the token's go to `slot`, and [first, end) are attended to."""

    keys: Tensor
    values: Tensor
    first: int
    slot: int
    end: int


class PageSlots(NamedTuple):
    """Pages (P, page_size, K, head_dim) of keys and values, and `ragged_page_attention`'s tables of them.

    slots (B,): where the token of each row goes, page * page_size + offset in the page; -1 for one that is not kept.
    Every row is a token of a sequence that `query_start_loc` counts.
    """

    key_pages: Tensor
    value_pages: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_start_loc: Tensor


class SlotOfLayer(NamedTuple):
    """A layer's slot, angles and mask, as `attention_step` takes them."""

    slot: Slot
    angles: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None


class PagesOfLayer(NamedTuple):
    """A layer's pages and angles, as `attention_step_pages` takes them. left: tokens that a row sees before its own."""

    pages: PageSlots
    angles: tuple[Tensor, Tensor] | None = None
    left: int | None = None


def decoder_layers(x: Tensor, layers: Sequence[LayerWeights], memory: Sequence[SlotOfLayer | PagesOfLayer]) -> Tensor:
    """Layer after layer, each of two halves: (B, 1, D) -> (B, 1, D). All layers have slots, or all have pages."""
    for layer, own in zip(layers, memory, strict=True):
        call = AttentionCall(sinks=layer.sinks, scale=layer.scale, softcap=layer.softcap)
        if isinstance(own, SlotOfLayer):
            x = attention_step(x, layer.attention, own.angles, own.slot, call._replace(mask=own.mask))
        else:
            banded = call._replace(left=own.left, right=0)
            x = attention_step_pages(x, layer.attention, own.angles, own.pages, banded)
        x = feed_forward_step(x, layer.feed_forward)
    return x


def attention_step(
    x: Tensor,
    weights: AttentionWeights,
    angles: tuple[Tensor, Tensor] | None,
    cache: Slot,
    call: AttentionCall,
) -> Tensor:
    """x + output(attention(norm(x))): (B, 1, D) -> (B, 1, D). The token's key and value are written to the cache.

    angles: cos and sin (B or 1, 1, R), or None for no rotary positions. call: of one query over the keys
    [first, end), so its mask broadcasts to (B, H, 1, end - first).
    """
    query, key, value = _projected(x, weights, angles, cache.keys.shape[-1])
    cache.keys[:, :, cache.slot], cache.values[:, :, cache.slot] = key[:, 0], value[:, 0]
    seen = slice(cache.first, cache.end)
    keys, values = (one[:, :, seen].transpose(1, 2) for one in (cache.keys, cache.values))
    attended = decode.over_lengths(query, keys, values, None, call)
    return x + product(attended.flatten(2), weights.output)


def attention_step_pages(
    x: Tensor, weights: AttentionWeights, angles: tuple[Tensor, Tensor] | None, pages: PageSlots, call: AttentionCall
) -> Tensor:
    """`attention_step` whose rows are tokens of sequences in pages: all keys and values are written before any row
    attends. call: without a mask; its window is the band of `ragged_page_attention`."""
    query, key, value = _projected(x, weights, angles, pages.key_pages.shape[-1])
    write_pages(pages.key_pages, pages.value_pages, key[:, 0], value[:, 0], pages.slots)
    attended = ragged_page.over_pages(query[:, 0], pages.key_pages, pages.value_pages, *pages[3:], None, call)
    return x + product(attended[:, None].flatten(2), weights.output)


def _projected(
    x: Tensor, weights: AttentionWeights, angles: tuple[Tensor, Tensor] | None, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 1, D) -> query (B, 1, H, head_dim), key and value (B, 1, K, head_dim), normalized and rotated."""
    normalized = rms_norm.rms_norm(x, weights.norm, weights.eps)
    query, key, value = (
        product(normalized, one).unflatten(-1, (-1, head_dim)) for one in (weights.query, weights.key, weights.value)
    )
    if weights.query_norm is not None:
        query = rms_norm.rms_norm(query, weights.query_norm, weights.head_eps)
    if weights.key_norm is not None:
        key = rms_norm.rms_norm(key, weights.key_norm, weights.head_eps)
    if angles is not None:
        query, key = rotary.rotary(query, key, *angles)
    return query, key, value


def feed_forward_step(x: Tensor, weights: FeedForwardWeights) -> Tensor:
    """x + down(activation(gate(norm(x))) * up(norm(x))): (B, 1, D) -> (B, 1, D)."""
    normalized = rms_norm.rms_norm(x, weights.norm, weights.eps)
    gate, up = (product(normalized, one) for one in (weights.gate, weights.up))
    if weights.activation == "silu":
        inner = glu.swiglu(gate, up)
    else:
        inner = glu.geglu(gate, up, "tanh" if weights.activation == "gelu_tanh" else "none")
    return x + product(inner, weights.down)


def product(x: Tensor, projection: AnyProjection) -> Tensor:
    """x (..., K) -> (..., N)."""
    if isinstance(projection, Projection):
        return linear.linear(x, projection.weight, projection.bias)
    _, dtype = storage(projection.format, projection.columns)
    weight = QuantizedWeight(
        projection.codes.view(dtype), projection.scale_bits.view(torch.float32), projection.zero, projection.format,
        (projection.rows, projection.columns), projection.group_size,
    )  # fmt: skip
    return quantized_matmul.quantized_matmul(x, weight, projection.bias)
