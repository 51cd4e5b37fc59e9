"""Attention in plain torch over blocks of queries: memory linear in T, forward and backward, on any device.

Each block is the definition (native.py) for some rows. While autograd records, a block saves only its inputs and is
recomputed in backward, as in Rabe and Staats, https://arxiv.org/abs/2112.05682.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.attention.call import AttentionCall, unflatten
from easytorch.kernels.attention.contract import resolve, visible
from easytorch.kernels.attention.dropout import keep_mask
from easytorch.kernels.attention.native import attend, working_dtype
from easytorch.kernels.interop.torch_func import transforming

BLOCK = 256  # rows: 256 x 4096 float32 scores are 4 MiB a head


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_dtype: torch.dtype | None = None,
    **features: Any,
) -> torch.Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), as the query; `softmax_dtype`: see native.py."""
    return blockwise(query, key, value, resolve(query, key, value, **features), softmax_dtype)


def blockwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`attention` for a resolved call."""
    length = query.shape[1]
    keys, left, right = key.shape[1], call.left, call.right
    working = softmax_dtype or working_dtype(query)
    outputs = []
    for first in range(0, length or 1, BLOCK):  # without a query too, for the gradients of the others
        last = min(first + BLOCK, length)
        # the keys that the band lets any row of the block see
        start = 0 if left is None else max(0, first + keys - length - left)
        stop = keys if right is None else min(keys, max(0, last + keys - length + right))
        # flat: a checkpoint in a graph takes tensors and numbers
        arguments = (
            query[:, first:last], key[:, start:stop], value[:, start:stop], first, start, keys - length, working,
            *call.part(slice(first, last), slice(start, stop)),
        )  # fmt: skip
        if not torch.is_grad_enabled() or transforming():  # torch.func refuses the hooks of a checkpoint
            outputs.append(_block(*arguments))
        elif query.device.type == "xla":
            run = functools.partial(_block, *arguments)
            outputs.append(checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=_on_xla))
        else:
            outputs.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=1)


def _on_xla() -> tuple[torch.autocast, torch.autocast]:
    """The contexts of a block and of its recomputation on xla: both without autocast, which backward does not restore.

    torch 2.9's checkpoint looks for a module torch.xla when it sees tensors of that device, so it is told no device.
    """
    return torch.autocast("xla", enabled=False), torch.autocast("xla", enabled=False)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    start: int,
    shift: int,
    working: torch.dtype,
    *fields: Any,
) -> torch.Tensor:
    """The rows from `first` over the keys from `start`; query i is aligned with key i + shift. fields: of the call."""
    call = unflatten(fields)
    length, keys = query.shape[1], key.shape[1]
    seen = visible(call, length, keys, query.device, shift=first + shift - start)
    keep = None
    if call.seed is not None:
        shape = (query.shape[0], query.shape[2], length, keys)
        keep = keep_mask(call.seed, call.dropout_prob, shape, query.device, first_row=first, first_column=start)
    return attend(query, key, value, call, seen=seen, keep=keep, working=working)[0]
