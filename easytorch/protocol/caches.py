"""Caches of a model and the inputs that go with them, by EasyDeL's names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from easytorch.argument_types import check_types
from easytorch.cache import RaggedPagesCache, RaggedPagesMetadata, TransformerCache, TransformerMetadata
from easytorch.cache.metadata import sizes_of
from easytorch.cache.transformer import EncoderDecoderTransformerCache
from easytorch.cache_names import CACHE, STATES, cache_argument, given_cache
from easytorch.protocol.attention_inputs import MaskInfo, check_cache, packed_inputs
from easytorch.protocol.cache_checks import check_cache_argument


@check_types("batch_size", "max_length")
def create_cache_metadata(
    model: PreTrainedModel, batch_size: int, max_length: int, pad_token_id: int | None = None
) -> TransformerMetadata:
    """The sizes of a cache of `batch_size` rows of up to `max_length` tokens.

    `ValueError` for a model that does not generate, and so takes no cache.
    """
    _check_decoder(model)
    if pad_token_id is None:
        pad_token_id = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    return TransformerMetadata.of(model.config, model.dtype, batch_size, max_length, pad_token_id)


@check_types("batch_size", "max_length")
def init_cache(
    model: PreTrainedModel,
    batch_size: int,
    max_length: int,
    starts: Tensor | Sequence[int] | int | None = None,
    shardings: Mapping[str, Any] | None = None,
    pad_token_id: int | None = None,
    *,
    kind: str = "static",
    **settings: Any,
) -> Any:
    """A `TransformerCache`, which the model takes as its cache; of a model with an encoder transformers'
    `EncoderDecoderCache` around one.

    kind: see `TransformerCache`; settings: its `group_size` and `residual_length` of quantized kinds. starts (B,): how
    many tokens of padding each row begins with, for `prepare_inputs_for_generation`. shardings: of caches on several
    devices, refused here.
    """
    if shardings is not None:
        raise ValueError("shardings place a cache on several devices; this one is on one: leave shardings out")
    metadata = create_cache_metadata(model, batch_size, max_length, pad_token_id)
    if starts is not None:
        starts = torch.as_tensor(starts)
        starts = starts.expand(batch_size) if starts.numel() == 1 else starts
    cache = TransformerCache(model.config, metadata, kind, starts, **settings)
    if model.config.is_encoder_decoder:
        return EncoderDecoderTransformerCache(cache, DynamicCache(config=model.config))
    return cache


@check_types("hbm_utilization", "page_size", "max_model_length")
def create_paged_metadata(
    model: PreTrainedModel, hbm_utilization: float, page_size: int, max_model_length: int
) -> RaggedPagesMetadata:
    """As many pages as fit the memory of the model's device that is free: see `RaggedPagesMetadata.of`."""
    _check_decoder(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder, whose keys lie in no pages; use init_cache")
    return RaggedPagesMetadata.of(
        model.config,
        model.dtype,
        model.device,
        hbm_utilization=hbm_utilization,
        page_size=page_size,
        max_model_length=max_model_length,
    )


@check_types("metadata")
def init_ragged_pages(
    model: PreTrainedModel,
    metadata: RaggedPagesMetadata | None = None,
    page_size: int | None = None,
    hbm_utilization: float | None = None,
    max_model_length: int | None = None,
) -> RaggedPagesCache:
    """The pages of `metadata`, or of what `create_paged_metadata` makes of the other three."""
    others = {"page_size": page_size, "hbm_utilization": hbm_utilization, "max_model_length": max_model_length}
    given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    if (metadata is None) == (len(given) < len(others)) or (metadata is not None and given):
        raise ValueError("give metadata, or all of page_size, hbm_utilization and max_model_length")
    if metadata is None:
        metadata = create_paged_metadata(model, **given)
    if not isinstance(metadata, RaggedPagesMetadata):
        raise TypeError(
            f"metadata must be a RaggedPagesMetadata, not {type(metadata).__name__}; see create_paged_metadata"
        )
    if not metadata.dtype.is_floating_point:
        raise ValueError(f"the metadata's dtype is {metadata.dtype}; keys and values are of a floating dtype")
    _check_decoder(model)
    expected = len(model.config.get_text_config(decoder=True).per_layer_config)
    if metadata.num_hidden_layers != expected:
        raise ValueError(f"the metadata is for {metadata.num_hidden_layers} layers; the model has {expected}")
    sizes, own = (metadata.num_kv_heads, metadata.k_headdim, metadata.v_headdim), _page_sizes(model)
    if sizes != own:
        raise ValueError(f"the metadata is for (heads, key and value head_dim) of {sizes}; the model has {own}")
    return RaggedPagesCache(metadata, model.device)


@check_types()
def prepare_inputs_for_call(model: PreTrainedModel, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call, without those that are None, and with EasyDeL's in transformers' words.

    mask_info and segment_ids become what keeps sequences apart; cache_metadata is checked against the cache.
    """
    inputs = dict(kwargs)
    mask_info, segments = inputs.pop("mask_info", None), inputs.pop("segment_ids", None)
    metadata = inputs.pop("cache_metadata", None)
    if metadata is not None:
        check_cache(metadata, given_cache(inputs))
    check_cache_argument(model, inputs)
    if mask_info is not None or segments is not None:
        inputs, _ = packed_inputs(model, inputs, mask_info, segments)
    return {name: value for name, value in inputs.items() if value is not None}


@check_types("input_ids", "max_length")
def prepare_inputs_for_generation(
    model: PreTrainedModel,
    input_ids: Tensor,
    max_length: int,
    pad_token_id: int | None = None,
    starts: Tensor | Sequence[int] | int | None = None,
    shardings: Mapping[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    mask_info: MaskInfo | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The arguments of the call for the prompt `input_ids` (B, T): a cache of `max_length` tokens, mask and positions.

        kwargs = prepare_inputs_for_generation(model, input_ids, 100, pad_token_id)
        output = model(input_ids, **kwargs)
        kwargs = update_inputs_for_generation(model, output, kwargs)   # and so on with the next token

    starts (B,): where each row begins, behind padding; without it and without a mask that is where the first token
    stands that is not `pad_token_id`. settings: those of `init_cache`.
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids must be a tensor of tokens (batch, length), not {type(input_ids).__name__}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids {tuple(input_ids.shape)} must be (batch, length), neither of them 0")
    if mask_info is not None:
        if mask_info.segment_ids is not None or attention_mask is not None:
            raise ValueError("a prompt takes one mask and no segments: one row is one sequence")
        attention_mask = mask_info.attention_mask
    batch, length = input_ids.shape
    if length > max_length:
        raise ValueError(f"max_length={max_length} is below the {length} tokens of the prompt")
    places = torch.arange(length, device=input_ids.device)
    if starts is not None:
        starts = torch.as_tensor(starts, device=input_ids.device).expand(batch)
    elif attention_mask is None and pad_token_id is not None:
        starts = ((input_ids != pad_token_id).cumsum(1) == 0).sum(1)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids) if starts is None else (places >= starts[:, None]).long()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} must have the shape {tuple(input_ids.shape)}")
    cache = init_cache(model, batch, max_length, starts, shardings, pad_token_id, **settings)
    taken = inspect.signature(model.forward).parameters
    name = cache_argument(model.forward)
    mask = attention_mask
    if _masks_are_full(cache):
        # of the full cache, whose end the past does not see: the same for every step
        mask = torch.nn.functional.pad(mask, (0, max_length - length), value=1)
    inputs = {name: cache, _mask_name(model): mask, "use_cache": True}
    if "position_ids" in taken:
        inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    if token_type_ids is not None:
        inputs["token_type_ids"] = token_type_ids
    return prepare_inputs_for_call(model, **inputs)


def also_by_length(model_class: Any) -> None:
    """`prepare_inputs_for_generation` of a class called with `max_length` is EasyDeL's, else transformers'."""
    theirs = model_class.prepare_inputs_for_generation

    @functools.wraps(theirs)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # transformers' second and third arguments are a length or None, and a cache
        if "max_length" in kwargs or (len(args) > 1 and isinstance(args[1], int)):
            return prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
        inputs: dict[str, Any] = theirs(self, input_ids, *args, **kwargs)
        return inputs

    model_class.prepare_inputs_for_generation = prepare


@check_types()
def update_inputs_for_generation(
    model: PreTrainedModel, model_outputs: Any, model_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the next step, for one more token of every row; `model_kwargs` stay as they are."""
    updated = dict(model_kwargs)
    for name in (CACHE, STATES):
        if getattr(model_outputs, name, None) is not None:
            updated[name] = getattr(model_outputs, name)
            break
    else:
        raise ValueError(f"{type(model_outputs).__name__} has no {CACHE}: call the model with use_cache=True")
    check_cache_argument(model, updated)
    mask = updated.get(_mask_name(model))
    if mask is not None and not (_masks_are_full(updated[name]) and mask.shape[1] == updated[name].longest):
        updated[_mask_name(model)] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if updated.get("position_ids") is not None:
        updated["position_ids"] = updated["position_ids"][:, -1:] + 1
    if updated.get("token_type_ids") is not None:
        updated["token_type_ids"] = updated["token_type_ids"][:, -1:]
    return updated


def _page_sizes(model: PreTrainedModel) -> tuple[int, int, int]:
    return sizes_of(model.config.get_text_config(decoder=True))


def _mask_name(model: PreTrainedModel) -> str:
    return "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"


def _masks_are_full(cache: Any) -> bool:
    """Whether masks cover the full cache: a static one, of attention alone."""
    return isinstance(cache, TransformerCache) and cache.kind == "static" and not any(cache.is_linear)


def _check_decoder(model: PreTrainedModel) -> None:
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    if not (model.can_generate() or causal):
        raise ValueError(f"{type(model).__name__} generates nothing, and takes no cache")
