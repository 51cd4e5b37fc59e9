"""native.py as torch operators: `easytorch::ring_forward` and `_backward`, on the ranks of a process group.

They work under autograd, torch.compile (no graph break) and torch.export; the group is named by its `group_name`, and
"" is one process alone.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.ring import native
from easytorch.kernels.ring.exchange import Alone, ProcessRing, Ring, agree
from easytorch.kernels.ring.layout import LAYOUTS
from easytorch.kernels.ring.native import Call


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: str,
    size: int,
    kernel: str,
    layout: str = "contiguous",
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
    """This rank's (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), as attention/contract.py has it for all.

    group, size: the name of the process group and how many ranks it has. kernel: what computes a tile, "native", "aten"
    or "triton". mask and bias broadcast to (B, H, T, size * S): this rank's queries, all keys in order of position. The
    gradients of sinks and of a bias are this rank's part of their sum. Every rank makes the same call, and its
    backward; without a seed all ranks drop by the one rank 0 draws. `ValueError` on every rank where they differ.
    """
    try:
        _check(
            query, key, value, size, layout, mask=mask, bias=bias, query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids, softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
        )  # fmt: skip
        left, right = band_of(causal, sliding_window)
    except ValueError as problem:
        if size > 1:
            agree(_ring(group), dict.fromkeys(_COMPARED, 0), str(problem), query.device)
        raise
    layout = layout if size > 1 else "contiguous"  # the chunks of one rank are in order already
    seed_given, seed_tensor = seed is not None, None
    if dropout_prob > 0.0:
        seed_tensor = torch.as_tensor(draw_seed() if seed is None else seed, dtype=torch.int64).to(query.device)
    tensors = (query, key, value, _four(mask), _four(bias), query_segment_ids, key_segment_ids, sinks)
    return ring_forward(
        *tensors, seed_tensor, group, kernel, layout, left, right, None if softcap is None else float(softcap),
        query.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale), float(dropout_prob), seed_given,
        recording(*tensors),
    )[0]  # fmt: skip


@torch.library.custom_op("easytorch::ring_forward", mutates_args=())
def ring_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    group: str,
    kernel: str,
    layout: str,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float,
    dropout_prob: float,
    seed_given: bool,
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """output (B, T, H, Dv), logsumexp (B, H, T), and the seed all ranks drop by (0 where none does)."""
    call = Call(
        query, key, value, mask, bias, query_ids, key_ids, sinks, seed, layout, left, right, softcap, scale,
        dropout_prob,
    )  # fmt: skip
    ring = _ring(group)
    common = _common_seed(ring, group, call, seed_given, recording)
    seed = query.new_zeros((), dtype=torch.int64) + common
    output, logsumexp = native.forward(ring, call._replace(seed=seed), _kernel(kernel))
    return output, logsumexp, seed


@ring_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty((batch, length, heads, value.shape[3])),
        query.new_empty((batch, heads, length), dtype=working),
        query.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op("easytorch::ring_backward", mutates_args=())
def ring_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    group: str,
    kernel: str,
    layout: str,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float,
    dropout_prob: float,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none."""
    call = Call(
        query, key, value, mask, bias, query_ids, key_ids, sinks, seed, layout, left, right, softcap, scale,
        dropout_prob,
    )  # fmt: skip
    dq, dk, dv, dbias, dsinks = native.backward(
        _ring(group), call, output, logsumexp, grad, _kernel(kernel), bias_grad=bias_grad
    )
    dbias, dsinks = (query.new_empty(0) if x is None else x for x in (dbias, dsinks))
    return dq, dk, dv, dbias, dsinks


@ring_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Tensor | None, query_ids: Any,
    key_ids: Any, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    bias_grad = rest[-1]
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0) if bias is None or not bias_grad else bias.new_empty(bias.shape),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:8], output[2], *output[:2])
    ctx.static = inputs[9:-2]


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs_bias, needs_sinks = ctx.needs_input_grad[4], ctx.needs_input_grad[7]
    dq, dk, dv, dbias, dsinks = ring_backward(grad, *ctx.saved_tensors, *ctx.static, needs_bias)
    tensors = (dq, dk, dv, None, dbias if needs_bias else None, None, None, dsinks if needs_sinks else None, None)
    return *tensors, *(None,) * 10


ring_forward.register_autograd(_backward, setup_context=_setup)


def _check(query: Tensor, key: Tensor, value: Tensor, size: int, layout: str, **features: Any) -> None:
    """`ValueError` where this rank's tensors do not fit one another or the layout."""
    length, keys = check_tensors(query, key, value)[1:3]
    ids = {name: features.pop(name) for name in ("query_segment_ids", "key_segment_ids")}
    check_features(query, key, **ids)
    check_features(query, key, keys=size * keys, **features)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"ring: the layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "zigzag" and size > 1 and (length % 2 or keys % 2):
        raise ValueError(
            f"ring: in the zigzag layout a rank holds two chunks of one length, got {length} queries and {keys} keys; "
            f"pad the whole sequence to a multiple of {2 * size}"
        )


def _four(matrix: Tensor | None) -> Tensor | None:
    """A mask or bias with all four dimensions."""
    return None if matrix is None else matrix.reshape((1,) * (4 - matrix.dim()) + tuple(matrix.shape))


_COMPARED = (
    "batch", "the local query length", "the local key length", "query heads", "key/value heads", "head_dim",
    "value head_dim", "dtype", "layout", "left", "right", "softcap", "softmax_scale", "dropout_prob",
    "the use of segment ids", "whether gradients are recorded", "seed",
)  # fmt: skip
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_agreed: set[tuple[Any, ...]] = set()


def _common_seed(ring: Ring, group: str, call: Call, seed_given: bool, recording: bool) -> int:
    """The seed of rank 0, once the ranks have found that they make the same call.

    On an accelerator that question makes the host wait, so a call like one before is not asked about again.
    """
    drops = call.seed is not None
    own = int(call.seed.item()) if call.seed is not None else 0
    if ring.size == 1:
        return own
    batch, length, heads, dim = call.query.shape
    values = (
        batch, length, call.key.shape[1], heads, call.key.shape[2], dim, call.value.shape[3],
        _DTYPES.index(call.query.dtype), LAYOUTS.index(call.layout), call.left, call.right, call.softcap, call.scale,
        call.dropout_prob, call.key_ids is not None, recording, own if drops and seed_given else None,
    )  # fmt: skip
    if call.query.device.type != "cpu" and not drops and (group, *values) in _agreed:
        return own
    seeds = agree(ring, dict(zip(_COMPARED, values, strict=True)), None, call.query.device, own)
    _agreed.add((group, *values))
    return seeds[0]


def _ring(group: Any) -> Ring:  # a str; torch has a type of its own for the names of groups
    return ProcessRing(_resolve_process_group(group)) if group else Alone()


@functools.cache
def _kernel(name: str) -> ModuleType:
    if name == "triton":
        from easytorch.kernels.ring import triton_blocks

        return triton_blocks
    from easytorch.kernels.ring import aten_blocks, blocks

    return {"native": blocks, "aten": aten_blocks}[name]
