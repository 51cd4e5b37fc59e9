"""Block-sparse attention inside a torch_xla graph: one node forward, one backward (tpu_blocksparse.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import check_features, check_tensors, window_of
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.blocksparse import tpu_blocksparse
from easytorch.kernels.blocksparse.native import check_structure
from easytorch.kernels.blocksparse.pallas_map import Rule
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
    chunk_size: int | None = None,
    prefix_length: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    dim = check_tensors(query, key, value)[5]
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    check_structure(query, chunk_size, prefix_length)
    seed_tensor = prefix = None
    if dropout_prob > 0.0:
        # as data of the graph, not as a constant: a new seed must not compile a new program
        seed = draw_seed() if seed is None else seed
        seed_tensor = torch.as_tensor(seed, dtype=torch.int64).to(torch.int32).to(query.device)
    if isinstance(prefix_length, Tensor):
        prefix = prefix_length.to(query.device, torch.int32).reshape(-1)
    rule = Rule(causal, *window_of(sliding_window), chunk_size, prefix_length if prefix is None else True)
    segments = [None if ids is None else ids.to(torch.int32) for ids in (query_segment_ids, key_segment_ids)]
    return call_jax_with_gradient(
        tpu_blocksparse.blocksparse_forward, tpu_blocksparse.blocksparse_backward, query, key, value, mask, bias,
        *segments, sinks, seed_tensor, prefix, rule=rule,
        scale=dim**-0.5 if softmax_scale is None else float(softmax_scale),
        softcap=None if softcap is None else float(softcap), dropout_prob=float(dropout_prob),
    )  # fmt: skip
