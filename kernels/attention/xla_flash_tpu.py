"""tpu_flash.py inside a torch_xla graph: one node forward, one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention import tpu_flash
from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    dim = check_tensors(query, key, value)[5]
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    left, right = band_of(causal, sliding_window)
    seed_tensor = None
    if dropout_prob > 0.0:
        # as data of the graph, not as a constant: a new seed must not compile a new program
        seed = draw_seed() if seed is None else seed
        seed_tensor = torch.as_tensor(seed, dtype=torch.int64).to(torch.int32).to(query.device)
    segments = [None if ids is None else ids.to(torch.int32) for ids in (query_segment_ids, key_segment_ids)]
    return call_jax_with_gradient(
        tpu_flash.flash_forward, tpu_flash.flash_backward, query, key, value, mask, bias, *segments, sinks, seed_tensor,
        scale=dim**-0.5 if softmax_scale is None else float(softmax_scale), left=left, right=right,
        softcap=None if softcap is None else float(softcap), dropout_prob=float(dropout_prob),
    )  # fmt: skip
