"""How many pages the engine makes of the memory it may use."""

from __future__ import annotations

import dataclasses
from typing import Any

from easytorch.cache import RaggedPagesMetadata
from easytorch.cache.memory import free_and_total

# Of the memory that is free, unless max_memory says otherwise: the rest of a CPU's is other programs'.
_SHARE = {"cpu": 0.5}
_SHARE_ELSEWHERE = 0.9


def pages_for(
    model: Any, max_memory: int | float | None, page_size: int, max_model_length: int, max_requests: int
) -> RaggedPagesMetadata:
    """The pages that fit `max_memory`: bytes as an int, or a share of the free memory as a float.

    Without it, at most as many as `max_requests` rows of `max_model_length` fill. `ValueError` where not even one page
    fits.
    """
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | float | None):
        raise TypeError(f"max_memory={max_memory!r} must be an int of bytes or a float, a share of the free memory")
    made = RaggedPagesMetadata.of(
        model.config, model.dtype, model.device, hbm_utilization=1.0, page_size=page_size, max_model_length=1
    )
    if isinstance(max_memory, int):
        most = max_memory
    else:
        share = _SHARE.get(model.device.type, _SHARE_ELSEWHERE) if max_memory is None else max_memory
        if not 0 < share <= 1:
            raise ValueError(f"max_memory={max_memory!r}: a float is a share of the free memory, above 0 and at most 1")
        most = int(free_and_total(model.device)[0] * share)
    pages = most // made.page_bytes
    if max_memory is None:
        pages = min(pages, max_requests * -(-max_model_length // page_size))
    if pages < 1:
        raise ValueError(
            f"max_memory={max_memory!r} is {most} bytes, and a page of {page_size} tokens takes {made.page_bytes}"
        )
    return dataclasses.replace(made, num_pages=pages, max_model_length=min(max_model_length, pages * page_size))
