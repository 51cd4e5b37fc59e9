"""One token of a pre-norm decoder layer by two operators in C++, where no hook runs between its modules.

The operators compute the same as the modules: each half of a layer takes its operator only where every module of the
half is the plain one. Hooks, adapters, sharded or small weights, gradients, graphs, and features that the
operator lacks are refused, and the modules run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from easytorch.cache_names import CACHE
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.decoder_step import cpu
from easytorch.kernels.decoder_step.native import (
    AnyProjection,
    AttentionWeights,
    FeedForwardWeights,
    PagesOfLayer,
    Projection,
    QuantizedProjection,
    SlotOfLayer,
)
from easytorch.kernels.rms_norm.cpu import SMALLEST_ROW
from easytorch.layers import attention
from easytorch.layers.cache_slots import slot_of
from easytorch.layers.config import attn_implementation, wants_attentions
from easytorch.layers.gate import activation_of
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.head_norm import HeadNormAttention
from easytorch.layers.linear import watched
from easytorch.layers.masks import CHUNKED
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import RMSNorm
from easytorch.layers.quantized import QuantizedLinear
from easytorch.layers.quantized_formats import FormatSettings
from easytorch.operations.dispatch.environment import untouched

# The operators compute what these methods do; a family that overrides one of them runs its modules.
_CALLS = ("__call__", "_call_impl")
_ATTENTION = tuple(
    (name, getattr(GroupedAttention, name))
    for name in (*_CALLS, "forward", "project", "projections", "score_scale", "project_output")
)
# Over pages these too, which say what is attended to there.
_OVER_PAGES = tuple((name, getattr(GroupedAttention, name)) for name in ("attend_to_cache", "features_of_pages"))
_FEED_FORWARD = tuple((name, getattr(GatedMLP, name)) for name in (*_CALLS, "forward", "_network", "projections"))
# of rotations also whether heads are normalized before them
_ROTATIONS: dict[Any, bool] = {GroupedAttention.rotate: False, HeadNormAttention.rotate: True}
_NORM = RMSNorm.forward
_LARGEST = torch.finfo(torch.float32).max
_FEATURES = frozenset({"sliding_window", "softcap", "s_aux"})
Memory = TypeVar("Memory")
_READ = frozenset({"attention_mask", CACHE})  # keywords of the attention that `attention_step` looks at


def steps(x: Tensor) -> bool:
    """Whether the operators may take hidden states x, which are a few tokens, on a CPU."""
    return cpu.takes(x) and untouched()


class AttentionHalf(NamedTuple):
    """What `attention_step` finds in the modules of a layer's attention.

    pages_taken: whether it may attend to keys and values in pages.
    """

    module: Any
    weights: AttentionWeights
    scale: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    pages_taken: bool


class Attended(NamedTuple, Generic[Memory]):
    """Memory that a half is to write to and attend to, and who learns of it by `written` afterwards."""

    memory: Memory
    owner: Any


def attention_half(norm: nn.Module, module: nn.Module, x: Tensor) -> AttentionHalf | None:
    """The half x + attention(norm(x)) for x that `steps` takes; None where the modules are to run. It depends on the
    modules, their config and the dtype of x alone."""
    kind: Any = type(module)
    normalized = _ROTATIONS.get(getattr(kind, "rotate", None))
    if normalized is None or not _is(module, _ATTENTION) or watched(module) or kind.interleaved:
        return None
    attention_: Any = module
    if "rotate" in attention_.__dict__ or "interleaved" in attention_.__dict__:
        return None
    config, features = attention_.config, attention_.features()
    if attn_implementation(config) != "easytorch" or wants_attentions(config) or not features.keys() <= _FEATURES:
        return None
    if module.training and attention_.attention_dropout:
        return None
    scale, softcap, window = attention_.scaling, features.get("softcap"), features.get("sliding_window")
    numbers = _is_number(scale) and (softcap is None or (_is_number(softcap) and softcap > 0.0))
    sinks = features.get("s_aux")
    if not numbers or not (window is None or type(window) is int) or not _are_sinks(sinks, x, attention_.num_heads):
        return None
    weights = _attention_weights(norm, module, x, normalized)
    if weights is None:
        return None
    pages_taken = _is(module, _OVER_PAGES) and attention_.layer_type != CHUNKED
    return AttentionHalf(module, weights, scale, softcap, sinks, window, pages_taken)


def attention_step(norm: nn.Module, module: nn.Module, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """x + attention(norm(x)) for x that `steps` takes, (B, T, D) -> (B, T, D); None where the modules are to run.

    T is 1, or any where the cache has pages.

    kwargs: those that the attention is called with.
    """
    past = kwargs.get(CACHE)
    page_slots = getattr(past, "page_slots", None)
    if past is None or (x.shape[1] != 1 and page_slots is None) or not passes(kwargs):
        return None
    half = attention_half(norm, module, x)
    if half is None:
        return None
    positions, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
    # looked at one by one: `contract.resolve` takes as long as a small product
    if page_slots is not None:
        found = None if mask is not None else in_pages(half, x, positions, page_slots)
        if found is None:
            return None
        pages, angles, left = found.memory
        call = AttentionCall(sinks=half.sinks, scale=half.scale, left=left, right=0, softcap=half.softcap)
        stepped = cpu.attention_step_pages(of_rows(x), half.weights, angles, pages, call).view(x.shape)
        written(half, found)
        return stepped
    placed = in_cache(half, x, positions, mask, past)
    if placed is None:
        return None
    slot, angles, mask = placed.memory
    call = AttentionCall(mask=mask, sinks=half.sinks, scale=half.scale, softcap=half.softcap)
    stepped = cpu.attention_step(x, half.weights, angles, slot, call)
    written(half, placed)
    return stepped


def in_cache(half: AttentionHalf, x: Tensor, positions: Any, mask: Any, past: Any) -> Attended[SlotOfLayer] | None:
    """Where x (B, 1, D) goes in a cache, and what it sees there: keywords as the attention's; None: by its modules."""
    module = half.module
    angles = positions if module.use_rope else None
    if angles is not None and not _fits_angles(angles, x, module.head_dim):
        return None
    target = slot_of(past, module.layer_idx, x.shape[0], x.dtype)
    if target is None:
        return None
    slot = target.slot
    if slot.keys.shape[1] != module.num_key_value_heads or slot.keys.shape[3] != module.head_dim:
        return None
    if mask is None:
        # without a mask a static cache's keys that were not written would be seen
        if target.buffer is None:
            return None
        if half.window is not None and slot.end - slot.first > half.window:
            slot = slot._replace(first=slot.end - half.window)
    elif not _fits_mask(mask, x, module.num_heads, slot.end - slot.first):
        return None
    return Attended(SlotOfLayer(slot, angles, mask), target)


def in_pages(
    half: AttentionHalf, x: Tensor, positions: Any, page_slots: Callable[..., Any]
) -> Attended[PagesOfLayer] | None:
    """Where the tokens of x (B, T, D) go in pages, and what they see; None: by the modules."""
    module = half.module
    if not half.pages_taken:
        return None
    batch, length, _ = x.shape
    angles = positions if module.use_rope else None
    if angles is not None:
        angles = _of_rows(angles, batch, length)
        if angles is None or not _fits_angles(angles, of_rows(x), module.head_dim):
            return None
    pages = page_slots(module.layer_idx, batch, length, x.dtype, (module.num_key_value_heads, module.head_dim))
    if pages is None:
        return None
    # a token sees itself and what is before it
    return Attended(PagesOfLayer(pages.slots, angles, None if half.window is None else half.window - 1), pages)


def written(half: AttentionHalf, attended: Attended[Any]) -> None:
    """Reports a step as our attention of the module, and to the cache whose memory it has written."""
    attention.observed(half.module)
    attended.owner.written()


def of_rows(x: Tensor) -> Tensor:
    """(B, T, D) -> (B * T, 1, D): a row of the operators is a token."""
    return x if x.shape[1] == 1 else x.view(-1, 1, x.shape[2])


def feed_forward_half(norm: nn.Module, module: nn.Module, x: Tensor) -> FeedForwardWeights | None:
    """The half x + mlp(norm(x)) for x that `steps` takes; None where the modules are to run. It depends on the modules
    and the dtype of x alone."""
    if not _is(module, _FEED_FORWARD) or watched(module):
        return None
    network: Any = module
    modules = network._modules
    scale = _scale_of(norm, x, x.shape[2])
    act = modules.get(network.act_name)
    activation = None if act is None or watched(act) else activation_of(act)
    gate, up, down = (_projection(modules.get(name)) for name in ("gate_proj", "up_proj", "down_proj"))
    if scale is None or activation is None or gate is None or up is None or down is None:
        return None
    if not (cpu.takes_product(x, gate, up) and cpu.takes_product(x, down)):
        return None
    eps: Any = norm.variance_epsilon
    return FeedForwardWeights(scale, gate, up, down, eps, activation)


def feed_forward_step(norm: nn.Module, module: nn.Module, x: Tensor) -> Tensor | None:
    """x + mlp(norm(x)) for x that `steps` takes, (B, T, D) -> (B, T, D); None where the modules are to run."""
    weights = feed_forward_half(norm, module, x)
    # rows are those of a batch, of several requests, or of one sequence
    return None if weights is None else cpu.feed_forward_step(of_rows(x), weights).view(x.shape)


def _is(module: nn.Module, methods: tuple[tuple[str, Any], ...]) -> bool:
    """Whether these are its methods, and none of its own stands before one."""
    kind, own = type(module), getattr(module, "__dict__", ())  # which a function of torch in its place lacks
    for name, method in methods:  # noqa: SIM110 - no comprehension, here and below: each is a call, and a token has many
        if name in own or getattr(kind, name, None) is not method:
            return False
    return True


def _is_number(value: Any) -> bool:
    """Whether it is a float that is finite in float32; the modules say what is wrong with others."""
    return type(value) is float and -_LARGEST <= value <= _LARGEST


def passes(kwargs: Mapping[str, Any]) -> bool:
    """Whether the other keywords of the attention change nothing."""
    for name, value in kwargs.items():
        if value is None or name in _READ or name in attention.HARMLESS:
            continue
        if name != "output_attentions" or value:
            return False
    return True


def _attention_weights(norm: nn.Module, module: Any, x: Tensor, normalized: bool) -> AttentionWeights | None:
    modules, dim = module._modules, module.head_dim
    scale = _scale_of(norm, x, x.shape[2])
    query, key, value = (_projection(modules.get(name)) for name in module.fused)
    output = _projection(modules.get(module.output_name))
    if scale is None or query is None or key is None or value is None or output is None:
        return None
    if not (cpu.takes_product(x, query, key, value) and cpu.takes_product(x, output)):
        return None
    if (query.weight.shape[0] if isinstance(query, Projection) else query.rows) != module.num_heads * dim:
        return None
    eps: Any = norm.variance_epsilon
    if not normalized:
        return AttentionWeights(scale, query, key, value, output, eps)
    of_query, of_key = modules.get("q_norm"), modules.get("k_norm")
    query_norm, key_norm = _scale_of(of_query, x, dim), _scale_of(of_key, x, dim)
    if query_norm is None or key_norm is None or of_query.variance_epsilon != of_key.variance_epsilon:
        return None
    return AttentionWeights(scale, query, key, value, output, eps, query_norm, key_norm, of_query.variance_epsilon)


def _scale_of(norm: Any, x: Tensor, size: int) -> Tensor | None:
    """The weight of a plain RMS norm."""
    if getattr(type(norm), "forward", None) is not _NORM or watched(norm) or size < SMALLEST_ROW:
        return None
    weight: Any = norm._parameters.get("weight")
    plain = type(weight) is nn.Parameter and weight.dtype is x.dtype and weight.shape == (size,) and weight.is_cpu
    found: Tensor | None = weight if plain and weight.is_contiguous() else None
    return found if type(norm.variance_epsilon) is float else None


def _projection(layer: Any) -> AnyProjection | None:
    """The tensors of a plain `nn.Linear` or `QuantizedLinear`, whose codes are laid out for it."""
    kind = type(layer)
    if (kind is not nn.Linear and kind is not QuantizedLinear) or watched(layer):
        return None
    if kind is QuantizedLinear:
        return _codes(layer)
    parameters = layer._parameters
    weight = parameters.get("weight")
    if type(weight) is not nn.Parameter or "bias" not in parameters:
        return None
    bias = parameters["bias"]
    return Projection(weight, bias) if bias is None or type(bias) is nn.Parameter else None


def _codes(layer: QuantizedLinear) -> QuantizedProjection | None:
    if not layer.laid_out:
        layer.lay_out()
    buffers = layer._buffers
    codes, scale_bits, zero = buffers.get("weight_codes"), buffers.get("weight_scale_bits"), buffers.get("weight_zero")
    bias = layer.bias  # no parameter where there is none
    if bias is not None and type(bias) is not nn.Parameter:
        return None
    if layer.settings.ordered or type(codes) is not Tensor or type(scale_bits) is not Tensor:
        return None
    format, group_size = _stored(layer.settings, layer.in_features)
    return QuantizedProjection(codes, scale_bits, zero, bias, format, layer.in_features, group_size, layer.out_features)


@functools.cache
def _stored(settings: FormatSettings, columns: int) -> tuple[str, int]:
    """The format's name in `quantized_matmul`, and its columns of a group."""
    return settings.storage, settings.columns(columns)


def _of_rows(positions: Any, batch: int, length: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin (B or 1, T, R) as those of B * T rows of one token; None where they are of other tokens."""
    cos, sin = positions
    if type(cos) is not Tensor or type(sin) is not Tensor or cos.dim() != 3 or sin.shape != cos.shape:
        return None
    if cos.shape[1] != length or cos.shape[0] not in (1, batch):
        return None
    if length == 1:
        return cos, sin
    size = (batch * length, 1, cos.shape[2])
    return cos.expand(batch, -1, -1).reshape(size), sin.expand(batch, -1, -1).reshape(size)


def _are_sinks(given: Any, x: Tensor, heads: int) -> bool:
    """Whether they are none, or a plain (heads,)."""
    plain = type(given) is nn.Parameter and given.dtype is x.dtype and given.shape == (heads,)
    return given is None or (plain and given.is_contiguous())


def _fits_angles(positions: Any, x: Tensor, dim: int) -> bool:
    cos, sin = positions
    shape = cos.shape
    return bool(
        cos.dtype is x.dtype
        and sin.dtype is x.dtype
        and sin.shape == shape
        and len(shape) == 3
        and (shape[0] == 1 or shape[0] == x.shape[0])
        and shape[1] == 1
        and shape[2] <= dim
        and shape[2] % 2 == 0
        and cos.stride(2) == 1
        and sin.stride(2) == 1
        and type(cos) is Tensor
        and type(sin) is Tensor
    )


def _fits_mask(mask: Any, x: Tensor, heads: int, keys: int) -> bool:
    if type(mask) is not Tensor or mask.dtype is not torch.bool or mask.dim() != 4 or not mask.is_cpu:
        return False
    rows, over, queries, columns = mask.shape
    return rows in (1, x.shape[0]) and over in (1, heads) and (queries, columns) == (1, keys)
