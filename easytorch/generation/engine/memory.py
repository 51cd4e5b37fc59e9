"""How many pages and recurrent states fit in the memory that the engine may use."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from easytorch.cache import RaggedPagesMetadata
from easytorch.cache.memory import free_and_total
from easytorch.cache_names import cache_of
from easytorch.generation.engine.supported import CachedLayers

# The default share of the free memory; on a CPU the rest is left to other programs.
_SHARE = {"cpu": 0.5}
_SHARE_ELSEWHERE = 0.9


class CacheSizes(NamedTuple):
    """metadata: of the pages. num_slots: how many requests run at once, with recurrent states of `slot_bytes` each."""

    metadata: RaggedPagesMetadata
    num_slots: int
    slot_bytes: int


def cache_sizes(
    model: Any,
    layers: CachedLayers,
    max_memory: int | float | None,
    page_size: int,
    max_model_length: int,
    max_requests: int,
) -> CacheSizes:
    """The pages and slots that fit `max_memory`: bytes as an int, or a share of the free memory as a float.

    Without it, at most as many as `max_requests` rows of `max_model_length` fill. States take at most half of it where
    there are keys and values too. `ValueError` where not even one page, or one slot, fits.
    """
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | float | None):
        raise TypeError(f"max_memory={max_memory!r} must be an int of bytes or a float, a share of the free memory")
    free = free_and_total(model.device)[0]
    if isinstance(max_memory, int):
        if max_memory > free:
            raise ValueError(f"max_memory={max_memory} is more than the {free} bytes of {model.device} that are free")
        most = max_memory
    else:
        share = _SHARE.get(model.device.type, _SHARE_ELSEWHERE) if max_memory is None else max_memory
        if not 0 < share <= 1:
            raise ValueError(f"max_memory={max_memory!r}: a float is a share of the free memory, above 0 and at most 1")
        most = int(free * share)
    slots, slot_bytes = max_requests, 0
    if layers.has_states:
        slot_bytes = state_bytes(model)
        slots = min(max_requests, (most // 2 if layers.attentions else most) // slot_bytes)
        if slots < 1:
            raise ValueError(
                f"max_memory={max_memory!r} is {most} bytes, and the recurrent states of one request take {slot_bytes}"
                + (", for which half of it is" if layers.attentions else "")
            )
        most -= slots * slot_bytes
    if not layers.attentions:  # each request has one page of 0 bytes
        metadata = RaggedPagesMetadata(
            layers=(), num_kv_heads=0, k_headdim=0, v_headdim=0, dtype=model.dtype, page_size=max_model_length,
            num_pages=slots, max_model_length=max_model_length, hbm_utilization=1.0,
        )  # fmt: skip
        return CacheSizes(metadata, slots, slot_bytes)
    made = RaggedPagesMetadata.of(
        model.config, model.dtype, model.device, hbm_utilization=1.0, page_size=page_size, max_model_length=1,
        layers=layers.attentions, latents=layers.has_latents,
    )  # fmt: skip
    pages = most // made.page_bytes
    if max_memory is None:
        pages = min(pages, max_requests * -(-max_model_length // page_size))
    if pages < 1:
        raise ValueError(
            f"max_memory={max_memory!r} is {most} bytes"
            + (" beside the recurrent states" if slot_bytes else "")
            + f", and a page of {page_size} tokens takes {made.page_bytes}"
        )
    longest = min(max_model_length, pages * page_size)
    return CacheSizes(dataclasses.replace(made, num_pages=pages, max_model_length=longest), slots, slot_bytes)


@torch.inference_mode()
def state_bytes(model: Any) -> int:
    """Bytes of the recurrent states of one request, measured on the model's own cache after one token."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    output = model(input_ids=token, use_cache=True)
    cache = cache_of(output)
    assert isinstance(cache, DynamicCache)
    states = [
        state for layer in cache.layers for kind in ("conv_states", "recurrent_states")
        for state in _tensors(getattr(layer, kind, None))
    ]  # fmt: skip
    return sum(state.numel() * state.element_size() for state in states)


def _tensors(states: Any) -> list[torch.Tensor]:
    values = states.values() if isinstance(states, dict) else states or ()
    return [one for one in values if isinstance(one, torch.Tensor)]
