"""native.py as custom operators: `easytorch::ring_forward` and `_backward`, on the ranks of a process group.

They work under autograd, torch.compile (no graph break) and torch.export; the group is given by its `group_name`; "" is
a single process.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from easytorch.kernels.attention.call import AttentionCall, flatten, schema, unflatten
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.layout import four_dims
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, given, like, split
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.ring import native
from easytorch.kernels.ring.exchange import Alone, ProcessRing, Ring, agree
from easytorch.kernels.ring.layout import LAYOUTS
from easytorch.kernels.ring.native import Shard


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: str,
    size: int,
    kernel: str,
    layout: str = "contiguous",
    **features: Any,
) -> Tensor:
    """This rank's (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), as attention/contract.py has it for all.

    group, size: the name of the process group and how many ranks it has. kernel: what computes a tile, "native", "aten"
    or "triton". mask and bias broadcast to (B, H, T, size * S): this rank's queries, all keys in order of position. The
    gradients of sinks and of a bias are this rank's part of their sum. Every rank makes the same call, and its
    backward; without a seed all ranks drop by the one rank 0 draws. `ValueError` on every rank where they differ.
    """
    try:
        columns = size * key.shape[1] if key.dim() == 4 else None  # else `resolve` says what does not fit
        call = resolve(query, key, value, columns=columns, **features)
        _check_layout(query, key, size, layout)
    except ValueError as problem:
        if size > 1:
            agree(_ring(group), dict.fromkeys(_COMPARED, 0), str(problem), query.device)
        raise
    layout = layout if size > 1 else "contiguous"  # a single rank's chunks are in order already
    call, seed_given = four_dims(call.seed_on(query.device)), features.get("seed") is not None
    recorded = recording(query, key, value, *call.tensors)
    return ring_forward(query, key, value, *flatten(call), group, kernel, layout, seed_given, recorded)[0]


_RING = "str group, str kernel, str layout"


@torch.library.custom_op(
    "easytorch::ring_forward", mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {schema()}, {_RING}, bool seed_given, bool recording) "
    "-> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def ring_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """output (B, T, H, Dv), logsumexp (B, H, 2, T), and the dropout seed of all ranks (0 without dropout)."""
    *fields, group, kernel, layout, seed_given, recording = rest
    shard = Shard(query, key, value, unflatten(fields), layout)
    ring = _ring(group)
    common = _common_seed(ring, group, shard, seed_given, recording)
    seed = query.new_zeros((), dtype=torch.int64) + common
    shard = shard._replace(call=shard.call._replace(seed=seed))
    output, logsumexp = native.forward(ring, shard, _kernel(kernel))
    return output, logsumexp, seed


@ring_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty((batch, length, heads, value.shape[3])),
        query.new_empty((batch, heads, 2, length), dtype=working),
        query.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op(
    "easytorch::ring_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor logsumexp, Tensor query, Tensor key, Tensor value, {schema()}, "
    f"{_RING}, bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def ring_backward(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    """The gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none."""
    *fields, group, kernel, layout, bias_grad = rest
    shard = Shard(query, key, value, unflatten(fields), layout)
    grads = native.backward(_ring(group), shard, output, logsumexp, grad, _kernel(kernel), bias_grad=bias_grad)
    return given(query, bias_grad, shard.call, *grads)


@ring_backward.register_fake
def _(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    return like(query, key, value, unflatten(rest[:-4]), rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, numbers = split(inputs)
    ctx.mark_non_differentiable(*output[1:])
    # the last one is the common dropout seed
    ctx.save_for_backward(*output[:2], *tensors[:-1], output[2])
    ctx.static = numbers[:-2]


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    bias_grad = AttentionCall(*needs[3 : 3 + len(AttentionCall._fields)]).bias
    return for_autograd(needs, ring_backward(grad, *ctx.saved_tensors, *ctx.static, bias_grad))


ring_forward.register_autograd(_backward, setup_context=_setup)


def _check_layout(query: Tensor, key: Tensor, size: int, layout: str) -> None:
    """`ValueError` where this rank's tensors do not fit the layout."""
    length, keys = query.shape[1], key.shape[1]
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"ring: the layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "zigzag" and size > 1 and (length % 2 or keys % 2):
        raise ValueError(
            f"ring: in the zigzag layout a rank holds two chunks of one length, got {length} queries and {keys} keys; "
            f"pad the whole sequence to a multiple of {2 * size}"
        )


_COMPARED = (
    "batch", "the local query length", "the local key length", "query heads", "key/value heads", "head_dim",
    "value head_dim", "dtype", "layout", "left", "right", "softcap", "softmax_scale", "dropout_prob",
    "the use of segment ids", "whether gradients are recorded", "seed",
)  # fmt: skip
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_agreed: set[tuple[Any, ...]] = set()


def _common_seed(ring: Ring, group: str, shard: Shard, seed_given: bool, recording: bool) -> int:
    """The seed of rank 0, after checking that the ranks make the same call.

    On an accelerator the check synchronizes with the host, so a call like an earlier one is not checked again.
    """
    query, key, call = shard.query, shard.key, shard.call
    drops = call.seed is not None
    own = 0 if call.seed is None else int(call.seed.item())
    if ring.size == 1:
        return own
    batch, length, heads, dim = query.shape
    values = (
        batch, length, key.shape[1], heads, key.shape[2], dim, shard.value.shape[3], _DTYPES.index(query.dtype),
        LAYOUTS.index(shard.layout), call.left, call.right, call.softcap, call.scale, call.dropout_prob,
        call.key_segment_ids is not None, recording, own if drops and seed_given else None,
    )  # fmt: skip
    if query.device.type != "cpu" and not drops and (group, *values) in _agreed:
        return own
    seeds = agree(ring, dict(zip(_COMPARED, values, strict=True)), None, query.device, own)
    _agreed.add((group, *values))
    return seeds[0]


def _ring(group: Any) -> Ring:  # a str; torch has its own type for group names
    return ProcessRing(_resolve_process_group(group)) if group else Alone()


@functools.cache
def _kernel(name: str) -> ModuleType:
    if name == "triton":
        from easytorch.kernels.ring import triton_blocks

        return triton_blocks
    from easytorch.kernels.ring import aten_blocks, blocks

    return {"native": blocks, "aten": aten_blocks}[name]
