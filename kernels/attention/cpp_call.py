"""An attention call as the operators in C++ take it (cpu_call.h): the fields of the record, as custom operators do.

`easytorch_cpu::flash`, `decode`, `ragged_page` and `attention_step` have `call.schema()` among their arguments. None is
absent, and no bound; mask and bias broadcast to the scores. A feature that they are to support is named in `SUPPORTED`,
read in cpu_call.h and computed in cpu_scores.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import TENSORS, AttentionCall, flatten
from easytorch.kernels.cpu import inference
from easytorch.kernels.cpu.inference import DTYPES

# Features beyond `call.COMMON` that attention and decode in C++ support.
SUPPORTED: frozenset[str] = frozenset()

# The arguments of a call without features, before and after its scale.
NO_TENSORS: tuple[None, ...] = (None,) * TENSORS
NO_NUMBERS = AttentionCall().numbers[1:]


def arguments(call: AttentionCall) -> tuple[Any, ...]:
    """The record as the operators' arguments: `operator(query, ..., *arguments(call), ...)`."""
    if call.bias is not None or call.sinks is not None:
        call = call._replace(bias=_numbers(call.bias), sinks=_contiguous(_numbers(call.sinks)))
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        ids = call.query_segment_ids.to(torch.int64), call.key_segment_ids.to(torch.int64)
        call = call._replace(query_segment_ids=ids[0], key_segment_ids=ids[1])
    return flatten(call)


def with_segments_as_mask(call: AttentionCall) -> AttentionCall:
    """The call of few queries without segments: their operators take them as a mask."""
    if call.query_segment_ids is None or call.key_segment_ids is None:
        return call
    same = (call.query_segment_ids[:, :, None] == call.key_segment_ids[:, None])[:, None]
    mask = same if call.mask is None else call.mask & same
    return call._replace(mask=mask, query_segment_ids=None, key_segment_ids=None)


def refusal(
    query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any], gradients: bool = False
) -> str | None:
    """None when the operators may be called with these tensors, else the reason. Asking may build the library.

    gradients: the operator has one.
    """
    # `resolve` refuses what is no tensor or has another dtype
    if query.dtype == torch.float64:
        return inference.other_dtype(query.dtype)
    given = (query, key, value, features.get("bias"), features.get("sinks"))
    return inference.refusal(given, gradients, dtype=query.dtype)


def _numbers(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype in DTYPES else tensor.to(torch.float32)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
