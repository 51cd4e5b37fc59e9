"""Attention in plain torch over blocks of queries: memory linear in T, forward and backward, on any device.

Each block is the definition (native.py) for some rows. While autograd records, a block keeps only its inputs and is
computed again in backward, as in Rabe and Staats, https://arxiv.org/abs/2112.05682.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.attention.contract import band_of, check_features, check_tensors, visible
from easytorch.kernels.attention.dropout import draw_seed, keep_mask
from easytorch.kernels.attention.native import attend, working_dtype
from easytorch.kernels.interop.torch_func import transforming

BLOCK = 256  # rows: 256 x 4096 float32 scores are 4 MiB a head


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    query_segment_ids: torch.Tensor | None = None,
    key_segment_ids: torch.Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | torch.Tensor | None = None,
    softmax_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), as the query; `softmax_dtype`: see native.py."""
    batch, length, keys, heads, _, dim, value_dim = check_tensors(query, key, value)
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    if dropout_prob > 0.0 and seed is None:
        seed = draw_seed()
    block = functools.partial(
        _block, softcap=softcap, scale=dim**-0.5 if softmax_scale is None else softmax_scale,
        dropout_prob=dropout_prob, seed=seed, working=softmax_dtype or working_dtype(query),
    )  # fmt: skip
    left, right = band_of(causal, sliding_window)
    outputs = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        # the keys that the band lets any row of the block see
        start = 0 if left is None else max(0, first + keys - length - left)
        stop = keys if right is None else min(keys, max(0, last + keys - length + right))
        arguments = (
            query[:, first:last], key[:, start:stop], value[:, start:stop],
            _part(mask, first, last, start, stop), _part(bias, first, last, start, stop),
            None if query_segment_ids is None else query_segment_ids[:, first:last],
            None if key_segment_ids is None else key_segment_ids[:, start:stop],
            sinks, first, start, (left, right), keys - length,
        )  # fmt: skip
        if not torch.is_grad_enabled() or transforming():  # torch.func refuses the hooks of a checkpoint
            outputs.append(block(*arguments))
        elif query.device.type == "xla":
            run = functools.partial(block, *arguments)
            outputs.append(checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=_on_xla))
        else:
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=1) if outputs else query.new_zeros(batch, 0, heads, value_dim)


def _on_xla() -> tuple[torch.autocast, torch.autocast]:
    """The contexts of a block and of its recomputation on xla: both without autocast, for backward restores none.

    The checkpoint of torch 2.9 looks for a module torch.xla where it is given tensors of that device, so it is given
    none, and knows nothing of the device.
    """
    return torch.autocast("xla", enabled=False), torch.autocast("xla", enabled=False)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    query_segment_ids: torch.Tensor | None,
    key_segment_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    first: int,
    start: int,
    band: tuple[int | None, int | None],
    shift: int,
    *,
    softcap: float | None,
    scale: float,
    dropout_prob: float,
    seed: int | torch.Tensor | None,
    working: torch.dtype,
) -> torch.Tensor:
    """The rows from `first` over the keys from `start`; query i of the whole stands at key i + shift."""
    length, keys = query.shape[1], key.shape[1]
    seen = visible(
        length, keys, query.device, mask=mask, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        sliding_window=band, shift=first + shift - start,
    )  # fmt: skip
    keep = None
    if seed is not None and dropout_prob > 0.0:
        shape = (query.shape[0], query.shape[2], length, keys)
        keep = keep_mask(seed, dropout_prob, shape, query.device, first_row=first, first_column=start)
    return attend(
        query, key, value, seen=seen, bias=bias, softcap=softcap, sinks=sinks, scale=scale, keep=keep,
        dropout_prob=dropout_prob, working=working,
    )[0]  # fmt: skip


def _part(tensor: torch.Tensor | None, first: int, last: int, start: int, stop: int) -> torch.Tensor | None:
    """Rows first:last and columns start:stop of what broadcasts to (B, H, T, S)."""
    if tensor is None:
        return None
    if tensor.dim() >= 2 and tensor.shape[-2] != 1:
        tensor = tensor[..., first:last, :]
    if tensor.dim() >= 1 and tensor.shape[-1] != 1:
        tensor = tensor[..., start:stop]
    return tensor
