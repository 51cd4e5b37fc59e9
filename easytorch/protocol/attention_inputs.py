"""Which tokens attend to which, as EasyDeL's `segment_ids` and `MaskInfo` say it, in a transformers model's inputs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from easytorch.cache import RaggedPagesMetadata, TransformerMetadata
from easytorch.cache_names import given_cache

_ALONE = "give each sequence a row of its own"


@dataclass(frozen=True, kw_only=True)
class MaskInfo:
    """attention_mask: as the model takes it. segment_ids (B, T): which of the sequences packed into a row each token
    belongs to, -1 for padding."""

    attention_mask: Tensor | None = None
    segment_ids: Tensor | None = None

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor) -> MaskInfo:
        return cls(attention_mask=attention_mask)

    @classmethod
    def from_segments(cls, segment_ids: Tensor) -> MaskInfo:
        return cls(segment_ids=segment_ids)


def check_cache(cache_metadata: Any, cache: Any) -> None:
    """An error for a cache that was not made for `cache_metadata`."""
    if not isinstance(cache_metadata, TransformerMetadata | RaggedPagesMetadata):
        kind = type(cache_metadata).__name__
        raise TypeError(f"cache_metadata is what create_cache_metadata or create_paged_metadata gives, not {kind}")
    cache_metadata.check(cache)


def packed_inputs(
    model: PreTrainedModel, batch: Mapping[str, Any], mask_info: MaskInfo | None, segment_ids: Tensor | None
) -> tuple[dict[str, Any], Tensor | None]:
    """`batch` with what keeps the sequences apart, and the segments; `ValueError` where they do not fit the batch."""
    inputs = dict(batch)
    if mask_info is not None:
        if not isinstance(mask_info, MaskInfo):
            raise TypeError(f"mask_info must be easytorch.protocol.MaskInfo, not {type(mask_info).__name__}")
        for name, given in (("attention_mask", inputs.get("attention_mask")), ("segment_ids", segment_ids)):
            if given is not None and getattr(mask_info, name) is not None:
                raise ValueError(f"{name} is given twice, by itself and in mask_info")
        if mask_info.attention_mask is not None:
            inputs["attention_mask"] = mask_info.attention_mask
        segment_ids = segment_ids if segment_ids is not None else mask_info.segment_ids
    if segment_ids is None:
        return inputs, None
    if not isinstance(segment_ids, Tensor):
        raise TypeError(f"segment_ids must be a tensor (batch, length), not {type(segment_ids).__name__}")
    tokens = inputs.get("input_ids")
    given = tokens if tokens is not None else inputs.get("inputs_embeds")
    if given is None:
        raise ValueError("segment_ids and mask_info are of tokens: give input_ids or inputs_embeds with them")
    shape = given.shape[:2]
    if segment_ids.shape != shape or segment_ids.is_floating_point():
        raise ValueError(f"segment_ids {tuple(segment_ids.shape)} must be integers of the tokens' shape {tuple(shape)}")
    mask = inputs.pop("attention_mask", None)
    if mask is not None and (mask.dim() != 2 or mask.shape != shape):
        raise ValueError("beside segment_ids the attention_mask may be (B, T) alone: the segments say the rest")
    segments = segment_ids if mask is None else segment_ids.masked_fill(mask == 0, -1)
    apart = _apart(model, inputs, segments.to(model.device))
    _check_apart(model)
    return apart, segments


@torch.no_grad()
def _check_apart(model: PreTrainedModel) -> None:
    """`ValueError` where two sequences in a row give other numbers than alone. Tried once, on six tokens, of
    transformers' own classes: some take positions and do not mask by them, or count them otherwise."""
    if _is_native(model) or vars(model).get("_keeps_apart") or torch.compiler.is_compiling():
        return
    words = model.config.get_text_config().vocab_size
    tokens = (torch.arange(6, device=model.device) + words // 2)[None] % words
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        alone = model.base_model(input_ids=tokens[:, 3:])
        both = model.base_model(
            **_apart(model, {"input_ids": tokens}, torch.tensor([[0, 0, 0, 1, 1, 1]], device=model.device))
        )
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # one that shapes masks itself
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{type(model).__name__} cannot be told which tokens are of one sequence: {_ALONE}") from error
    finally:
        for module in training:
            module.training = True
    packed, single = both[0][:, 3:].float(), alone[0].float()
    allowed = 1e-3 if model.dtype in (torch.float32, torch.float64) else 3e-2
    if not float((packed - single).abs().max()) <= allowed * float(single.abs().max()):
        raise ValueError(f"{type(model).__name__} does not keep packed sequences apart by their positions: {_ALONE}")
    vars(model)["_keeps_apart"] = True


def _is_native(model: PreTrainedModel) -> bool:
    """FSDP2 puts a class of its own before that of the model."""
    return any(one.__module__.startswith("easytorch.models.") for one in type(model).__mro__)


def _apart(model: PreTrainedModel, inputs: dict[str, Any], segments: Tensor) -> dict[str, Any]:
    recurrent = any(hasattr(module, "conv1d") for module in model.modules())
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    if (refusal := _refusal(model, recurrent, recurrent and not causal)) is not None:
        raise ValueError(f"{type(model).__name__} {refusal}: {_ALONE}")
    if given_cache(inputs) is not None or inputs.get("position_ids") is not None:
        raise ValueError("segment_ids take the place of position_ids, and need the whole rows: no cache")
    starts = segments != torch.nn.functional.pad(segments, (1, 0), value=-2)[:, :-1]
    _check_contiguous(segments, starts)
    positions = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    positions = positions - torch.where(starts, positions, 0).cummax(dim=1).values
    if not recurrent and not causal:
        return inputs | _bidirectional(model, segments, positions)
    if causal:
        inputs["position_ids"] = positions + _first_position(model)
        # transformers' own classes that ignore positions are told by a mask instead
        kinds: set[Any] = {type(module) for module in model.modules()}
        if not all(map(_masks_by_positions, kinds)):
            if getattr(model.config, "alibi", False):
                raise ValueError(f"{type(model).__name__} counts distances (ALiBi) by a mask of whole rows: {_ALONE}")
            inputs["attention_mask"] = _mask(segments, model.dtype, causal=True)
    if recurrent:
        inputs["seq_idx"] = (starts.cumsum(1) - 1).to(torch.int32)
    return inputs | {"use_cache": False}


def _refusal(model: PreTrainedModel, recurrent: bool, only_recurrent: bool) -> str | None:
    """Why a model cannot keep packed sequences apart; None: it can."""
    if recurrent and not _is_native(model):
        return "is transformers' own recurrent class, whose states run on from one packed sequence to the next"
    if model.config.is_encoder_decoder:
        return "has an encoder and a decoder, and segment_ids would be of one of them"
    if not only_recurrent and "position_ids" not in _arguments(model):
        return "takes no position_ids, which are what keeps packed sequences apart"
    return None


def _check_contiguous(segments: Tensor, starts: Tensor) -> None:
    for row, first in zip(segments.tolist(), starts.tolist(), strict=True):
        runs = [one for one, begins in zip(row, first, strict=True) if begins and one >= 0]
        if len(runs) != len(set(runs)):
            raise ValueError("segment_ids: the tokens of one sequence must lie side by side")


def _bidirectional(model: PreTrainedModel, segments: Tensor, positions: Tensor) -> dict[str, Any]:
    """The mask of an encoder, added to the scores, which every implementation takes, and its positions."""
    mask = _mask(segments, model.dtype, causal=False)
    return {"attention_mask": mask, "position_ids": positions + _first_position(model)}


def _first_position(model: PreTrainedModel) -> int:
    """0, or 1 behind the padding index, from where RoBERTa and its like count."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    padding = next((one.padding_idx for one in tables if isinstance(one, torch.nn.Embedding)), None)
    return 0 if padding is None else padding + 1


def _mask(segments: Tensor, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """(B, 1, T, T), added to the scores: tokens see those of their own segment, of causal models those before them."""
    same = (segments[:, None, :, None] == segments[:, None, None, :]).expand(-1, 1, -1, -1)
    seen = same.tril() if causal else same
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


@functools.cache
def _masks_by_positions(kind: type[torch.nn.Module]) -> bool:
    """Whether a class whose forward makes a causal mask tells it the positions, by which it keeps sequences apart."""
    if not getattr(kind, "masks_by_positions", True):
        return False
    try:
        calls = re.findall(r"\bcreate_causal_mask\((.*?)\n?\s*\)\n", inspect.getsource(kind.forward), re.DOTALL)
    except (OSError, TypeError):  # a class made at run time
        return True
    # keywords passed on as they came may have positions; those of the cache's name alone have none
    passed_on = re.compile(r"\bposition_ids\b|\*\*(?!cache_keyword|state_keyword)")
    return all(passed_on.search(call) for call in calls)


def _arguments(model: PreTrainedModel) -> set[str]:
    """The arguments of forward, and of the base model that it passes its keywords to."""
    return {name for one in (model, model.base_model) for name in inspect.signature(one.forward).parameters}
