"""Biases of the scores by the bucket of the distance between query and key, as T5's (arXiv:1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import nn

from easytorch.layers.basics import without_adapter


def bucket_of(distance: torch.Tensor, buckets: int, farthest: int, *, bidirectional: bool = True) -> torch.Tensor:
    """key - query -> 0 .. buckets - 1: one step each at first, then by logarithm up to `farthest`.

    Bidirectional: each direction has half of the buckets. Causal: the past has all of them, and later keys are in
    bucket 0.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = buckets * (distance > 0)
        steps = distance.abs()
    else:
        steps = (-distance).clamp(min=0)
    exact = buckets // 2
    far = torch.log(steps.clamp(min=exact).float() / exact) / math.log(farthest / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return torch.where(steps < exact, steps, far) + offset


def relative_bias(
    table: nn.Embedding,
    queries: int,
    keys: int,
    past: int | torch.Tensor = 0,
    *,
    farthest: int,
    buckets: int | None = None,
    bidirectional: bool = True,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The rows of `table` (buckets, H) by distance as a bias (1, H, queries, keys); query 0 stands at position `past`.

    The bias depends on the distance alone, so one value per distance is looked up, and each query's row is a window of
    them: the table's gradient is then summed by distance instead of by score. A graph, in which the window's size would
    be a constant, looks up every score.
    """
    numbers = without_adapter(table).num_embeddings if buckets is None else buckets
    graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if graph or (device is not None and device.type not in ("cpu", "cuda")):
        at = torch.arange(queries, device=device)[:, None] + past
        distances = torch.arange(keys, device=device)[None] - at
        return table(bucket_of(distances, numbers, farthest, bidirectional=bidirectional)).permute(2, 0, 1)[None]
    distances = torch.arange(1 - queries, keys, device=device) - past
    values = table(bucket_of(distances, numbers, farthest, bidirectional=bidirectional)).t()
    return values.unfold(1, keys, 1).flip(1)[None]


def merged(mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The bias and the mask, boolean (True attends) or added to the scores, as one tensor that is added to them."""
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def check_buckets(model_type: str, buckets: int, farthest: int) -> None:
    """`ValueError` for a config whose distances fall into no bucket, or into one that does not exist."""
    if buckets < 4:
        raise ValueError(
            f"{model_type}: config.relative_attention_num_buckets={buckets} must be 4 or more: two for each side"
        )
    if farthest <= buckets // 2:
        raise ValueError(
            f"{model_type}: config.relative_attention_max_distance={farthest} must exceed half of "
            f"config.relative_attention_num_buckets={buckets}, which are of one step each"
        )
